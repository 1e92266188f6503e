"""Troubles that only a run can show: rows without a probe, for the page on troubleshooting."""

from __future__ import annotations

from serverless_gpu.doctor.facts import Check, CheckGroup


def _row(code: str, title: str, symptoms: tuple[str, ...], cause: str, mend: str) -> Check:
    return Check(code=code, group=CheckGroup.RUNS, title=title, symptoms=symptoms, cause=cause, mend=mend)


CHECKS = (
    _row(
        "not-picklable",
        "Something captured cannot travel",
        ("NotPicklable: …", "TypeError: cannot pickle '_thread.lock' object"),
        "The function, its arguments and what it captures are sent to other processes. Locks, open files, sockets, "
        "generators and handles of databases cannot be; the message names the object and the path to it.",
        "make such objects inside the function",
    ),
    _row(
        "captured-dataset",
        "A call that sends gigabytes",
        ("serverless-gpu: the call is … large", "calls are slow, and the slower the more data the notebook holds"),
        "A data set or model that was made outside is captured by the function and copied for each call.",
        "load data inside the function, or pass a path",
    ),
    _row(
        "gpu-type-mismatch",
        "GPUs of another type",
        ("GpuTypeMismatch: …",),
        "gpu_type= names another card than this machine has.",
        "leave gpu_type out to take what is there, or write a type that `sgpu gpus` shows",
    ),
    _row(
        "waiting",
        "A run that does not start",
        ("serverless-gpu: waiting for 8 H100: GPU-… is held by run … of … (pid …, since …)",),
        "Devices are lent to one run at a time; the sentence says who has them.",
        "wait, or `sgpu cancel` that run; `sgpu doctor` shows foreign processes and quarantine",
    ),
    _row(
        "hang",
        "Nothing moves any more",
        ("no output for minutes while GPUs are at 100 % or at 0 %", "Watchdog caught collective operation timeout"),
        "Ranks wait for each other in a collective that one of them never reaches: another branch, an unequal number "
        "of batches, a rank that returned early or failed silently.",
        "look at the run's hang-1.txt (`sgpu show`), which has the Python stack of every rank; do the same number of "
        "steps on each rank",
    ),
    _row(
        "output-of-other-ranks",
        "Only rank 0 is seen",
        ("prints of other ranks are missing",),
        "Output of rank 0 is shown live; that of all ranks is stored.",
        'ranks_log="all", or afterwards: sgpu logs --rank all',
    ),
    _row(
        "exit-137",
        "Host memory ran out",
        ("OutOfMemory: rank 0 was ended because host memory ran out", "exit code 137, Killed, no traceback"),
        "The kernel ended a process because memory was short: the machine's, the container's, or that of memory=.",
        "load less per rank, fewer DataLoader workers (each has its own copy), a larger memory= or container",
    ),
    _row(
        "gpu-out-of-memory",
        "GPU memory ran out",
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate …", "reason gpu_oom"),
        "Model, optimizer, activations and batch of one rank do not fit on its card.",
        "a smaller batch, gradient accumulation or checkpointing, FSDP; `sgpu doctor` shows foreign processes on it",
    ),
    _row(
        "cuda-fork",
        "CUDA in a forked process",
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess",),
        "CUDA was used before a DataLoader worker or multiprocessing child was forked.",
        "use CUDA only after the workers are there, or multiprocessing_context='spawn'",
    ),
    _row(
        "only-a-part-is-trained",
        "Each rank trains on everything, or on one part only",
        ("the loss is the same with 1 and with 8 GPUs", "an epoch takes as long with 8 GPUs as with one"),
        "Without a distributed sampler all ranks read the same data; with DataParallel one process does all the work.",
        "DistributedSampler(dataset) and set_epoch(), DistributedDataParallel(model)",
    ),
    _row(
        "ready-only-once",
        "DDP with LoRA or gradient checkpointing",
        ("RuntimeError: Expected to mark a variable ready only once.",),
        "Re-entrant gradient checkpointing runs parts of the backward pass twice, which DDP does not allow.",
        "gradient_checkpointing_kwargs={'use_reentrant': False}",
    ),
    _row(
        "unused-parameters",
        "DDP with parameters that are not used",
        ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",),
        "Some parameters took no part in the loss on this rank.",
        "freeze them (requires_grad=False), or DistributedDataParallel(model, find_unused_parameters=True)",
    ),
    _row(
        "ranks-differ",
        "Ranks that read differently",
        ("samples are read twice or not at all",),
        "Shards are dealt by rank and worker; another num_workers or seed on one rank deals them differently.",
        "the same num_workers, seed and file list on every rank",
    ),
    _row(
        "rendezvous",
        "Ranks do not find each other",
        ("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients.",),
        "A rank never called init_process_group, or MASTER_ADDR and MASTER_PORT were set to something else.",
        "call it on every rank, and leave MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE as they are",
    ),
    _row(
        "tracked-by-all-ranks",
        "Parameters that are logged by every rank",
        ("MlflowException: Changing param values is not allowed",),
        "Ranks of a program (`sgpu submit`) log different values of a parameter to the one run they have; those of a "
        "function have theirs kept apart.",
        "log from rank 0 only: if serverless_gpu.runtime.get_global_rank() == 0",
    ),
    _row(
        "rank-exited",
        "A rank that left without a result",
        ("RunError: rank 0 called sys.exit before it returned a result", "RankCrashed: rank 0 … before it returned"),
        "sys.exit, os._exit or a signal ended the process; its exit code is not a result.",
        "return from the function; `sgpu logs --stream stderr` shows what it said last",
    ),
    _row(
        "debugger",
        "breakpoint() in a rank",
        ("bdb.BdbQuit",),
        "A rank has no terminal: the debugger reads the end of its input, and leaves.",
        "python <run directory>/_air.py repeats rank 0 in a terminal, where breakpoint() stops; debugpy attaches an "
        "editor to a rank: docs/how-to/debugging.md",
    ),
    _row(
        "result-does-not-travel",
        "A result that cannot be sent back",
        ("ResultNotSerializable: …", "ResultTooLarge: …", "ResultUnavailableHere: …"),
        "What a rank returns is pickled there and loaded here; it must be loadable with what is imported here.",
        "return numbers, tensors, state_dict()s and paths",
    ),
    _row(
        "supervisor-lost",
        "A run that is LOST",
        ("NodeLost: the run's supervisor process died (was it killed, or the machine restarted?)",),
        "Who looked after the run was ended from outside: out of memory, a reboot, the end of a container or of a "
        "login session (KillUserProcesses=yes).",
        "run it again; loginctl enable-linger keeps processes after logout",
    ),
    _row(
        "ray-lost",
        "A Ray cluster that is gone",
        ("EngineHeadLost: Ray on node … is gone: its raylet ended while the run needed it", "reason engine_head_lost"),
        "The GCS or the raylet of a run of `ray_launch` ended: host memory ran out, the disk of /tmp is full, the run "
        "called `ray stop`, or somebody killed it. A cluster has one head and lives as long as one run.",
        "read ray/<node>/ in the run's directory (`sgpu show` lists it), first gcs_server.out and raylet.out; fewer "
        "tasks at once (num_cpus= of a task) need less memory; `retries=` makes another attempt through a server",
    ),
    _row(
        "utilisation-zero",
        "GPU utilisation shows 0 %",
        ("nvidia-smi shows 0 % while a run goes on",),
        "Utilisation is sampled: short kernels fall between samples, and waiting for data is waiting.",
        "look at memory and step time; more DataLoader workers, pin_memory=True, larger batches",
    ),
)

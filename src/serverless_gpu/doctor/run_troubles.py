"""Lists problems that only a run can show: rows without a probe, for the troubleshooting page."""

from __future__ import annotations

from serverless_gpu.doctor.facts import Check, CheckGroup


def _row(code: str, title: str, symptoms: tuple[str, ...], cause: str, mend: str) -> Check:
    return Check(code=code, group=CheckGroup.RUNS, title=title, symptoms=symptoms, cause=cause, mend=mend)


CHECKS = (
    _row(
        "not-picklable",
        "A captured object that pickle cannot serialize",
        ("NotPicklable: …", "TypeError: cannot pickle '_thread.lock' object"),
        "The client sends the function, its arguments and captured objects to other processes. Locks, open files, "
        "sockets, generators and database handles cannot be sent. The message names the object and the path to "
        "it.",
        "create such objects inside the function",
    ),
    _row(
        "captured-dataset",
        "A call that sends gigabytes",
        (
            "serverless-gpu: every rank loads the … that this call to … carries; largest: …",
            "calls are slow, and slower with more data in the notebook",
        ),
        "The function captures a data set or model from outside, and the client copies it for each call.",
        "load data inside the function, or pass a path",
    ),
    _row(
        "gpu-type-mismatch",
        "GPUs of another type",
        ("GpuTypeMismatch: …",),
        "gpu_type= names another GPU type than this machine has.",
        "omit gpu_type to use the available GPUs, or give a type that `sgpu gpus` shows",
    ),
    _row(
        "waiting",
        "A run that does not start",
        ("serverless-gpu: waiting for 8 H100: GPU-… is held by run … of … (pid …, since …)",),
        "Only one run at a time can use a device. The message names the run that holds the device.",
        "wait, or cancel that run with `sgpu cancel`; `sgpu doctor` shows foreign processes and quarantine",
    ),
    _row(
        "hang",
        "A run that hangs",
        ("no output for minutes while GPUs are at 100 % or at 0 %", "Watchdog caught collective operation timeout"),
        "Ranks wait in a collective that one rank never reaches. The missing rank took another branch, had "
        "another number of batches, returned early or failed silently.",
        "read the run's hang-1.txt (`sgpu show` lists it), which has the Python stack of every rank; run the same "
        "number of steps on each rank",
    ),
    _row(
        "output-of-other-ranks",
        "Output of rank 0 only",
        ("prints of other ranks are missing",),
        "The client shows the output of rank 0 live. The node stores the output of all ranks.",
        'use ranks_log="all", or later: sgpu logs --rank all',
    ),
    _row(
        "exit-137",
        "Host memory ran out",
        ("OutOfMemory: rank 0 was ended because host memory ran out", "exit code 137, Killed, no traceback"),
        "The kernel killed a process because memory ran out. The limit is that of the machine, of the container, "
        "or of memory=.",
        "load less data per rank, use fewer DataLoader workers (each has its own copy), or set a larger memory= "
        "or container limit",
    ),
    _row(
        "gpu-out-of-memory",
        "GPU memory ran out",
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate …", "reason gpu_oom"),
        "The model, optimizer, activations and batch of one rank do not fit on its GPU.",
        "use a smaller batch, gradient accumulation or checkpointing, or FSDP; `sgpu doctor` shows foreign "
        "processes on the GPU",
    ),
    _row(
        "cuda-fork",
        "CUDA in a forked process",
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess",),
        "The program used CUDA before it forked a DataLoader worker or multiprocessing child.",
        "use CUDA only after all workers have started, or set multiprocessing_context='spawn'",
    ),
    _row(
        "only-a-part-is-trained",
        "Ranks that train on all data, or on one part only",
        ("the loss is the same with 1 and with 8 GPUs", "an epoch takes as long with 8 GPUs as with one"),
        "Without a distributed sampler, all ranks read the same data. With DataParallel, one process does all the "
        "work.",
        "use DistributedSampler(dataset) with set_epoch(), and DistributedDataParallel(model)",
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
        "DDP with unused parameters",
        ("RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",),
        "On this rank, some parameters did not contribute to the loss.",
        "freeze them (requires_grad=False), or use DistributedDataParallel(model, find_unused_parameters=True)",
    ),
    _row(
        "ranks-differ",
        "Ranks that read different shards than expected",
        ("ranks read some samples twice or not at all",),
        "The loader assigns shards by rank and worker. A different num_workers or seed on one rank changes the "
        "assignment.",
        "use the same num_workers, seed and file list on every rank",
    ),
    _row(
        "rendezvous",
        "Ranks that cannot connect to each other",
        ("torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for clients.",),
        "A rank did not call init_process_group, or the program changed MASTER_ADDR and MASTER_PORT.",
        "call init_process_group on every rank, and do not change MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE",
    ),
    _row(
        "tracked-by-all-ranks",
        "Parameters that every rank logs",
        ("MlflowException: Changing param values is not allowed",),
        "All ranks of a program (`sgpu submit`) share one MLflow run, and they log different values of a "
        "parameter. Ranks of a function do not share an MLflow run.",
        "log from rank 0 only: if serverless_gpu.runtime.get_global_rank() == 0",
    ),
    _row(
        "rank-exited",
        "A rank that exits without a result",
        ("RunError: rank 0 called sys.exit before it returned a result", "RankCrashed: rank 0 … before it returned"),
        "sys.exit, os._exit or a signal ended the process. Its exit code is not a result.",
        "return from the function; `sgpu logs --stream stderr` shows its last output",
    ),
    _row(
        "debugger",
        "breakpoint() in a rank",
        ("bdb.BdbQuit",),
        "A rank has no terminal, so the debugger reads the end of its input and exits.",
        "`python <run directory>/_air.py` repeats rank 0 in a terminal, where breakpoint() stops; debugpy "
        "attaches an editor to a rank: docs/how-to/debugging.md",
    ),
    _row(
        "result-does-not-travel",
        "A result that cannot be sent back",
        ("ResultNotSerializable: …", "ResultTooLarge: …", "ResultUnavailableHere: …"),
        "A rank pickles its result and the client loads it. The client must have all modules that the result needs.",
        "return numbers, tensors, state_dict()s and paths",
    ),
    _row(
        "supervisor-lost",
        "A run that is LOST",
        ("NodeLost: the run's supervisor process died …",),
        "The supervisor of the run was killed: out of memory, a reboot, or the end of a container or login "
        "session (KillUserProcesses=yes).",
        "start the run again; `loginctl enable-linger` keeps processes after logout",
    ),
    _row(
        "ray-lost",
        "A Ray cluster that has ended",
        ("EngineHeadLost: Ray on node … is gone: its raylet ended while the run needed it", "reason engine_head_lost"),
        "The GCS or a raylet of a `ray_launch` run ended. Possible causes: host memory ran out, the disk of /tmp "
        "is full, or a process called `ray stop` or killed it. A cluster has one head and exists as long as its "
        "run.",
        "read ray/<node>/ in the run's directory (`sgpu show` lists it), first gcs_server.out and raylet.out; run "
        "fewer tasks at once (num_cpus= of a task) to use less memory; with `retries=` a server starts another "
        "attempt",
    ),
    _row(
        "utilisation-zero",
        "GPU utilisation shows 0 %",
        ("nvidia-smi shows 0 % although the run is working",),
        "nvidia-smi samples utilisation. It can miss short kernels, and it shows 0 % while ranks wait for data.",
        "check memory and step time; use more DataLoader workers, pin_memory=True and larger batches",
    ),
)

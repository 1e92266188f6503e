"""Lists problems that only a run can reveal, for the troubleshooting page."""

from __future__ import annotations

from serverless_gpu.doctor.facts import Check, CheckGroup


def _row(code: str, title: str, symptoms: tuple[str, ...], cause: str, mend: str) -> Check:
    return Check(code=code, group=CheckGroup.RUNS, title=title, symptoms=symptoms, cause=cause, mend=mend)


CHECKS = (
    _row(
        "not-picklable",
        "A captured object that pickle cannot serialize",
        ("NotPicklable: …", "TypeError: cannot pickle '_thread.lock' object"),
        "The client sends the function, its arguments and captured objects to other processes. The client cannot "
        "send locks, open files, sockets, generators or database handles. The error message names the object and its "
        "attribute path.",
        "create locks, files, sockets, generators and database handles inside the function",
    ),
    _row(
        "captured-dataset",
        "A call that sends gigabytes",
        (
            "serverless-gpu: every rank loads the … that this call to … carries; largest: …",
            "each call becomes slower as the notebook holds more data",
        ),
        "The function captures a data set or model. The client sends the captured object with each call.",
        "load the data inside the function, or pass a file path as an argument",
    ),
    _row(
        "gpu-type-mismatch",
        "A request for an unavailable GPU type",
        ("GpuTypeMismatch: …",),
        "The gpu_type= argument names a GPU type that this machine lacks.",
        "omit gpu_type to use the available GPUs, or give a type that `sgpu gpus` shows",
    ),
    _row(
        "waiting",
        "A run that does not start",
        ("serverless-gpu: waiting for 8 H100: GPU-… is held by run … of … (pid …, since …)",),
        "A GPU serves one run at a time. The waiting message names the run that holds the GPU.",
        "cancel the run that holds the GPU (sgpu cancel), or check for foreign processes and quarantined GPUs (sgpu "
        "doctor)",
    ),
    _row(
        "hang",
        "A run that hangs",
        (
            ("a run prints nothing for minutes while its GPUs show a utilisation of 100 % or 0 %"),
            "Watchdog caught collective operation timeout",
        ),
        "Ranks wait in a collective that one rank never reaches. The missing rank took a different branch, had fewer "
        "batches, returned early or failed silently.",
        "compare the ranks' Python stacks in the run's hang-1.txt (sgpu show prints the path), and run equally many "
        "steps on all ranks",
    ),
    _row(
        "output-of-other-ranks",
        "Output of rank 0 only",
        ("the output of all ranks except rank 0 is missing",),
        "By default, the client streams the output of rank 0. The node stores the output of all ranks.",
        'set ranks_log="all", or read the stored output of all ranks: sgpu logs --rank all',
    ),
    _row(
        "exit-137",
        "Host memory ran out",
        ("OutOfMemory: rank 0 was ended because host memory ran out", "exit code 137, Killed, no traceback"),
        "The kernel killed a process because host memory ran out. The machine, the container and the memory= "
        "argument each limit host memory.",
        "load less data per rank, use fewer DataLoader workers, or raise the memory limit of the run (memory=) or "
        "the container",
    ),
    _row(
        "gpu-out-of-memory",
        "GPU memory ran out",
        ("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate …", "reason gpu_oom"),
        "The model, optimizer, activations and batch of one rank do not fit on its GPU.",
        "use a smaller batch, gradient accumulation, gradient checkpointing or FSDP, and check for foreign GPU "
        "processes (sgpu doctor)",
    ),
    _row(
        "cuda-fork",
        "CUDA in a forked process",
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess",),
        "The program used CUDA before it forked a DataLoader worker or multiprocessing child.",
        "initialize CUDA after all DataLoader workers have started, or set multiprocessing_context='spawn'",
    ),
    _row(
        "only-a-part-is-trained",
        "Ranks that do not split the training data",
        ("the loss is the same with 1 and with 8 GPUs", "an epoch takes as long with 8 GPUs as with one"),
        "Without a distributed sampler, all ranks read the same data. DataParallel runs all model replicas in a "
        "single process.",
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
        "Some model parameters on a rank did not contribute to the loss.",
        "freeze the unused parameters (requires_grad=False), or use DistributedDataParallel(model, "
        "find_unused_parameters=True)",
    ),
    _row(
        "ranks-differ",
        "Ranks that read different shards than expected",
        ("ranks read some samples twice or not at all",),
        "The data loader assigns shards by rank and worker. A different num_workers or seed on one rank changes the "
        "shard assignment.",
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
        "All ranks of a program (`sgpu submit`) share one MLflow run. MLflow rejects different values for the same "
        "parameter. The ranks of a function do not share an MLflow run.",
        "log parameters only on rank 0: if serverless_gpu.runtime.get_global_rank() == 0",
    ),
    _row(
        "rank-exited",
        "A rank that exits without a result",
        ("RunError: rank 0 called sys.exit before it returned a result", "RankCrashed: rank 0 … before it returned"),
        "A call of sys.exit or os._exit, or a signal, ended the rank process. The client does not accept an exit "
        "code as a result.",
        "return a value from the function, and read the rank's last error output with `sgpu logs --stream stderr`",
    ),
    _row(
        "debugger",
        "breakpoint() in a rank",
        ("bdb.BdbQuit",),
        "The debugger reaches the end of standard input and exits, because a rank has no terminal.",
        "`python <run directory>/_air.py` repeats rank 0 in a terminal, where breakpoint() stops; debugpy "
        "attaches an editor to a rank: docs/how-to/debugging.md",
    ),
    _row(
        "result-does-not-travel",
        "A result that the client cannot receive",
        ("ResultNotSerializable: …", "ResultTooLarge: …", "ResultUnavailableHere: …"),
        "A rank pickles the function's result. The client unpickles the result. The client must have every "
        "module that the result needs.",
        "return numbers, tensors, state dictionaries or file paths",
    ),
    _row(
        "supervisor-lost",
        "A run that is LOST",
        ("NodeLost: the run's supervisor process died …",),
        "The run's supervisor process died because of a memory shortage, a reboot, or the end of a container or "
        "login session (KillUserProcesses=yes).",
        "start the run again, and run `loginctl enable-linger` to keep processes after logout",
    ),
    _row(
        "ray-lost",
        "A Ray cluster that has ended",
        ("EngineHeadLost: Ray on node … is gone: its raylet ended while the run needed it", "reason engine_head_lost"),
        "The GCS or a raylet of a `ray_launch` run exited. Possible causes are exhausted host memory, a full /tmp, a "
        "call of `ray stop`, or a kill signal. The Ray cluster has a single head and ends with the run.",
        "read ray/<node>/ in the run's directory (`sgpu show` lists it), first gcs_server.out and raylet.out; run "
        "fewer tasks at once (num_cpus= of a task) to use less memory; with `retries=` a server starts another "
        "attempt",
    ),
    _row(
        "utilisation-zero",
        "GPU utilisation shows 0 %",
        ("nvidia-smi shows 0 % although the run is working",),
        "nvidia-smi samples GPU utilisation and can miss short kernels. Utilisation is also 0 % while ranks wait for "
        "data.",
        "measure GPU memory and step time, then try more DataLoader workers, pin_memory=True or larger batches",
    ),
)

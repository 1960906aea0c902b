"""`specahead bench`, on GPUs: kernels, whole steps, KV offload and the services."""

import argparse


def add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="8b", metavar="NAME", help="8b, 1b, or a model's folder or id")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, nargs="+", default=[10240, 32768, 102400])
    parser.add_argument("--queries", type=int, default=5, help="of each sequence")
    parser.add_argument("--share", type=float, default=0.1, help="of the pages that sparse attention reads")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_run_kernels)


def _run_kernels(flags: argparse.Namespace) -> None:
    from benchmarks.gpu_timing import require_gpu
    from benchmarks.kernels import run_kernel_benchmark
    from benchmarks.shapes import read_shape_of

    require_gpu()
    run_kernel_benchmark(
        shape_name=flags.shape,
        shape=read_shape_of(flags.shape),
        batches=flags.batch,
        contexts=flags.context,
        rows=flags.queries,
        share=flags.share,
        repeats=flags.repeats,
        json_file=flags.json,
    )


def add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-shape", default="8b", metavar="NAME", help="8b, 1b, or a model's folder or id")
    parser.add_argument("--draft-shape", default="1b", metavar="NAME")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_run_step)


def _run_step(flags: argparse.Namespace) -> None:
    from benchmarks.gpu_timing import require_gpu
    from benchmarks.shapes import read_shape_of
    from benchmarks.step import run_step_benchmark

    require_gpu()
    run_step_benchmark(
        target=flags.target_shape,
        target_shape=read_shape_of(flags.target_shape),
        draft=flags.draft_shape,
        draft_shape=read_shape_of(flags.draft_shape),
        repeats=flags.repeats,
        json_file=flags.json,
    )


def add_offload(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="8b", metavar="NAME", help="8b, 1b, tiny, or a model's folder or id")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N", help="default: 1 8")
    parser.add_argument("--contexts", type=int, nargs="+", default=[10240, 32768, 102400], metavar="N")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.1], metavar="X", help="of the pages that a step selects"
    )
    parser.add_argument(
        "--hot", type=float, nargs="+", metavar="X", help="frames, of all pages (default: 0.125 0.25 0.5)"
    )
    parser.add_argument(
        "--kv-memory",
        type=float,
        metavar="GIB",
        help="of the GPU, instead of --batches and --hot: as many sessions as fit it, and more in tiers",
    )
    parser.add_argument("--sessions-factor", type=int, metavar="N", help="times as many sessions in tiers (default: 4)")
    parser.add_argument("--queries", type=int, default=5, help="of each sequence")
    parser.add_argument("--passes", type=int, default=4, help="over the recorded rounds, with nothing hot at first")
    parser.add_argument(
        "--home-layers", type=int, default=1, help="layers with pinned memory of their own; the others share it"
    )
    parser.add_argument("--host-memory", type=float, metavar="GIB", help="that may be pinned (default: what is free)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="step times against the size of the hot buffer")
    parser.set_defaults(run=_run_offload)


def _run_offload(flags: argparse.Namespace) -> None:
    from benchmarks.gpu_timing import require_gpu
    from benchmarks.offload import Settings, run_offload_benchmark
    from benchmarks.shapes import read_shape_of

    if flags.shape != "tiny":  # which is rehearsed without a GPU
        require_gpu()
    if flags.kv_memory is not None and (flags.batches or flags.hot):
        raise ValueError("--kv-memory says how many sessions and frames there are: leave --batches and --hot out")
    if flags.kv_memory is None and flags.sessions_factor is not None:
        raise ValueError("--sessions-factor is of the sessions that fit --kv-memory: give it")
    given = {
        "batches": flags.batches and tuple(flags.batches),
        "hot": flags.hot and tuple(flags.hot),
        "host_memory": None if flags.host_memory is None else int(flags.host_memory * 2**30),
        "kv_memory": None if flags.kv_memory is None else int(flags.kv_memory * 2**30),
        "sessions_factor": flags.sessions_factor,
    }
    settings = Settings(
        contexts=tuple(flags.contexts),
        shares=tuple(flags.shares),
        queries=flags.queries,
        passes=flags.passes,
        home_layers=flags.home_layers,
        **{name: value for name, value in given.items() if value is not None},
    )
    run_offload_benchmark(flags.shape, read_shape_of(flags.shape), settings, flags.json, flags.plot)


def add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-shape", default="8b", choices=["8b", "1b", "tiny"])
    parser.add_argument("--draft-shape", default="1b", choices=["8b", "1b", "tiny"])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--context", type=int, default=32768, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=200, help="generated by each session")
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.8, help="imposed, a token")
    parser.add_argument("--budget", type=float, default=0.1, help="share of the KV that approximate reads")
    parser.add_argument("--read-share", type=float, default=0.1, help="of later draft steps")
    parser.add_argument("--waves", type=int, default=2, help="micro-batches that sessions are drafted in")
    parser.add_argument("--no-ahead", action="store_true", help="wait for each verdict before drafting on")
    parser.add_argument(
        "--host-kv-memory",
        type=float,
        metavar="GIB",
        help="as the backing store of the target's KV (default: no tiers)",
    )
    parser.add_argument(
        "--kv-memory", type=float, metavar="GIB", help="of the target's GPU for KV (default: what is left of it)"
    )
    parser.add_argument("--sparse-only", action="store_true", help="leave the dense rows out")
    parser.add_argument(
        "--gpus", type=int, nargs=2, metavar=("TARGET", "DRAFT"), help="device of each service; else as torch finds"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.set_defaults(run=_run_serve)


def _run_serve(flags: argparse.Namespace) -> None:
    from benchmarks.serve import run_serve_benchmark

    memory = {"host-kv-memory": flags.host_kv_memory, "kv-memory": flags.kv_memory}
    if any(value is not None and value <= 0 for value in memory.values()):
        raise ValueError("--host-kv-memory and --kv-memory must be positive; leave out what is not wanted")
    drafting = ["--read-share", str(flags.read_share), "--waves", str(flags.waves)]
    given = {name: value for name, value in memory.items() if value is not None}
    target_kv = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    run_serve_benchmark(
        target=flags.target_shape,
        draft=flags.draft_shape,
        sessions=flags.sessions,
        context=flags.context,
        tokens=flags.tokens,
        gamma=flags.gamma,
        acceptance=flags.acceptance,
        budget=flags.budget,
        drafting=(*drafting, *(["--no-ahead"] if flags.no_ahead else [])),
        target_kv=tuple(target_kv),
        gpus=tuple(flags.gpus) if flags.gpus else None,
        json_file=flags.json,
        dense=not flags.sparse_only,
    )

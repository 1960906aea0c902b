"""`python -m specahead.lab.benchmarks.serving target|draft`: a service under measurement, which starts as any does."""

from specahead.config.garbage import collect_seldom


def main() -> None:
    collect_seldom()
    from specahead.lab.benchmarks.serving.service import run  # imports what any service does, which counts as its start

    run()


if __name__ == "__main__":
    main()

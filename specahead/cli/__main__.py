"""`python -m specahead.cli`: the `specahead` command without its installed script."""

from specahead.cli.main import main

if __name__ == "__main__":
    main()

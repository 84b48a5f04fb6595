"""Tandem runs one language model across the machines a person owns."""

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    # Looking the version up takes longer than everything else that `tandem --help` does of its own.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tandem")
    except PackageNotFoundError:  # running from a source tree that was never installed
        return "0.0.0"

"""`python -m tandem.cli`, for those whose PATH has no `tandem`."""

from tandem.cli.main import main

main()

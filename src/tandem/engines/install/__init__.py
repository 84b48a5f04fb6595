"""Installing engines: `tandem engines install`."""

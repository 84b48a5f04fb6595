"""The cluster's carrier: discovery, messages, questions and liveness over zenoh in peer mode."""

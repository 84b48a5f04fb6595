"""How nodes speak to one another directly: HTTP over mutual TLS, msgpack bodies.

Tokens, commands and files go this way; what the whole cluster needs to know goes over the bus.
"""

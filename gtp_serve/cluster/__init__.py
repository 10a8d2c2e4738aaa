"""Several engines as one server, on Ray: replicas, routing, one weight version for all of them.

An extra (``gtp-serve[ray]``); nothing else imports it, and only ``ray_side`` and the actors import Ray.
"""

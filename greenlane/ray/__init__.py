"""A Greenlane on each GPU of a Ray cluster, behind one address: `serve run greenlane.ray.application:build config=FILE`.

`application` is the only module that imports Ray. It makes three deployments of Ray Serve: `server.Server` (one for each GPU),
`ingress.Ingress` and `coordinator.Coordinator`.
"""

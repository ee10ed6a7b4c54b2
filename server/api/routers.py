"""The routes that every form of the server has, of tenants and of everybody. Those of administration are in `server.admin`."""

from . import docs, metadata, model_control, status_page, text, trace_settings

ROUTERS = (text.router, metadata.router, model_control.router, docs.router, status_page.router, trace_settings.router)
"""In the order in which a request is compared with them: texts come most often."""

"""One inference of a tenant's model, whatever the client speaks: admission, slot, queue, statistics. No HTTP and no JSON."""

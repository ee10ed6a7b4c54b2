"""A launch loop in C for one tenant, and what it buys over the worker: a prototype. See docs/lab/2026-11-26-launch-loop.md."""

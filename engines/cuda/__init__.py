"""What any library of engines needs on a GPU: streams, graphs, copies, staging, the launch loop's recipes. Knows no library."""

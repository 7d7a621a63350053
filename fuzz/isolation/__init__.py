"""Runs kernels in a process of their own: one that crashes or hangs is a finding, and not the end of the run.

The process is forked, so it has what the adapter set up and starts in milliseconds; it stays, and takes one case after
the other, until it dies, takes too long, or the run ends. Cases go to it and observations come back over a socket that
nobody else has; judging, shrinking and saving stay where they were. Linux only, as the arena is.

On a device the parent leaves the device alone, since a fork could not use it then. Where an adapter's import has used
it, or has started threads, which no fork has, the process is a fresh Python that loads the adapters again
(fuzz/fresh.py).

On the CPU a page that cannot be accessed lies right behind every tensor that is no cache.

- parent.py says which process a case goes to, and what to make of what comes back; it asks through worker.py.
- child.py is what runs in the process, however it was started. It knows nothing of the parent's side.
- messages.py is what the two say to each other.
- forks.py starts processes, and cuts them off from what they have inherited.
- endings.py words how a process ended.
"""

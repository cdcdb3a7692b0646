"""Run work in this process: concurrently, with retries and progress, until it ends or Ctrl-C."""

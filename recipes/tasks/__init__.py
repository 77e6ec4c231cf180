"""Models of several tasks beside a shared bottom and single tasks."""

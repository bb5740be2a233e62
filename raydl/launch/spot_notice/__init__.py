"""Drains a spot machine's Ray node before preemption: ``python -m raydl.launch.spot_notice``.

Open-source Ray does not poll the cloud for the notice that a machine will be preempted. This
program does, on every spot node; after a notice it drains the node, with the remaining time as
the deadline. The workers there leave after their next exchange, and their replacements continue
with their replicas. It polls the metadata service of the machine:

    aws     /latest/meta-data/spot/instance-action, with a session token (IMDSv2): two minutes
    gcp     /computeMetadata/v1/instance/preempted: 30 seconds
    azure   /metadata/scheduledevents, a Preempt event of this machine: at least 30 seconds

It polls again if the service does not answer, and retries a drain that fails as long as the machine
runs, until a minute past its end. Exit status: 0 drained, 1 not drained in time, 2 wrong options.

It uses only the standard library: a process that waits for weeks should not hold Ray in memory.
The command ``ray drain-node`` drains the node.
"""

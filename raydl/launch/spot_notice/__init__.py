"""Tells Ray that a spot machine will be taken away: ``python -m raydl.launch.spot_notice``.

Open-source Ray does not ask the cloud whether its machine is about to go. This does, on every
spot node; when the notice comes it drains the node, with the time that is left as the deadline.
The workers there leave after their next exchange, and their replacements go on with their
replicas. It asks the metadata service of the machine, in the words of its cloud:

    aws     /latest/meta-data/spot/instance-action, with a session token (IMDSv2): two minutes
    gcp     /computeMetadata/v1/instance/preempted: 30 seconds
    azure   /metadata/scheduledevents, a Preempt event of this machine: at least 30 seconds

A service that does not answer is asked again, a drain that fails is tried again as long as the
machine is there, a minute past its end at most. Exit status: 0 drained, 1 not drained in time,
2 a mistake in what was asked for.

Only the standard library is used: a process that waits for weeks should not hold Ray in memory.
The drain itself is the command ``ray drain-node``.
"""

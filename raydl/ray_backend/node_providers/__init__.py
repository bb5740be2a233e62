"""Clouds' machines for Ray's launcher, which grants nothing on the way.

Ray's own launcher opens more than a cluster needs before it starts the first machine. On Google
Cloud it makes a service account with the roles compute.admin, storage.objectAdmin and
iam.serviceAccountUser of the whole project, and puts its key for SSH on all of the project's
machines. On Azure it makes the head's identity Contributor of the resource group, gives every
worker that identity, too, and opens SSH to everybody. No setting keeps it from that.

The classes here start, label and end machines as Ray's do, but take networks and identities from
the cluster's file. ``provider: {type: external, module: ...}`` in such a file names one; it is
imported where ``ray up`` runs, and on the head.
"""

"""Node providers for Ray's cluster launcher that create no identities, networks or grants.

Ray's own providers grant more than a cluster needs before they start the first machine. On Google
Cloud they create a service account with the roles compute.admin, storage.objectAdmin and
iam.serviceAccountUser of the whole project, and add its SSH key to all machines of the project. On
Azure they make the head's identity a Contributor of the resource group, assign that identity to
every worker, and open SSH to the internet. No setting disables this.

The classes here start, label and end machines as Ray's do, but take networks and identities from
the cluster's file. ``provider: {type: external, module: ...}`` in such a file names one. It is
imported where ``ray up`` runs, and on the head.
"""

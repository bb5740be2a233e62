#!/bin/sh
# The network, the two service accounts and the three roles of the cluster in gcp-spot.yaml. It
# starts no machine.
#
#   sh cluster_configs/gcp/access.sh PROJECT BUCKET SSH_FROM      create or update them
#   sh cluster_configs/gcp/access.sh --delete PROJECT BUCKET      delete all but the roles
#
# Both may be repeated after an error. The roles stay because Google Cloud blocks the id of a deleted
# role for weeks; a role that is bound to no account grants nothing and costs nothing.
#
# - The head accepts SSH from SSH_FROM only. Nodes may connect to each other on any port; nothing
#   else can connect to a worker. Workers have no public address and reach the internet through Cloud
#   NAT.
# - The head may start, label and end machines in this subnet, without public addresses, whose names
#   are those of this cluster's workers (head-role.yaml, subnet-role.yaml); list the machines of the
#   project (look-role.yaml); give a machine the worker's account; and read and write objects of the
#   bucket.
# - A worker may read objects of the bucket.
#
# To run this script you need the roles compute.networkAdmin, compute.securityAdmin,
# iam.serviceAccountAdmin, iam.roleAdmin, resourcemanager.projectIamAdmin and the bucket's
# storage.admin. For `ray up` you need compute.instanceAdmin.v1, and iam.serviceAccountUser of the
# two accounts.
set -eu

name=raydl-gcp-spot # cluster_name, region and zone of gcp-spot.yaml
region=us-central1
zone=us-central1-a
here=$(dirname "$0")

usage() {
    echo "usage: $0 PROJECT BUCKET SSH_FROM, or $0 --delete PROJECT BUCKET" >&2
    exit 2
}

delete=
if [ "${1-}" = --delete ]; then
    delete=yes
    shift
    [ $# -eq 2 ] || usage
else
    [ $# -eq 3 ] || usage
    if ! printf %s "$3" | grep -Eqx '[1-9][0-9]{0,2}(\.[0-9]{1,3}){3}/(1[6-9]|2[0-9]|3[0-2])'; then
        echo "$0: SSH_FROM must be a network with a prefix of 16 to 32 bits, like 203.0.113.7/32, got $3" >&2
        exit 2
    fi
fi
project=$1
bucket=$2
head=$name-head@$project.iam.gserviceaccount.com
worker=$name-worker@$project.iam.gserviceaccount.com
subnet_role=projects/$project/roles/raydlGcpSpotSubnet
look_role=projects/$project/roles/raydlGcpSpotLook
head_role=projects/$project/roles/raydlGcpSpotHead
# A condition must not contain a comma: gcloud would end it there.
at=projects/$project/zones/$zone
own_workers="title=own-workers,expression=resource.name.startsWith('$at/instances/ray-$name-worker-') || resource.name.startsWith('$at/disks/ray-$name-worker-')"

run() {
    gcloud --quiet --project "$project" "$@"
}

if [ -n "$delete" ]; then
    # If one of them is already deleted, delete the others all the same.
    set +e
    run storage buckets remove-iam-policy-binding "gs://$bucket" --member "serviceAccount:$head" --role roles/storage.objectUser
    run storage buckets remove-iam-policy-binding "gs://$bucket" --member "serviceAccount:$worker" --role roles/storage.objectViewer
    run projects remove-iam-policy-binding "$project" --member "serviceAccount:$head" --role "$look_role" --condition None
    run projects remove-iam-policy-binding "$project" --member "serviceAccount:$head" --role "$head_role" --condition "$own_workers"
    run compute firewall-rules delete "$name-ssh"
    run compute firewall-rules delete "$name-nodes"
    run compute routers delete "$name" --region "$region"
    run compute networks subnets delete "$name" --region "$region"
    run compute networks delete "$name"
    run iam service-accounts delete "$head"
    run iam service-accounts delete "$worker"
    exit 0
fi
ssh_from=$3

has() {
    run "$@" >/dev/null 2>&1
}

create_or_update_role() {
    has iam roles undelete "$1" || true # in case it was deleted in the last days
    change=create
    if has iam roles describe "$1"; then
        change=update
    fi
    run iam roles "$change" "$1" --file "$2"
}

has iam service-accounts describe "$head" || run iam service-accounts create "$name-head" --display-name "Head of $name"
has iam service-accounts describe "$worker" || run iam service-accounts create "$name-worker" --display-name "Workers of $name"

has compute networks describe "$name" || run compute networks create "$name" --subnet-mode custom
has compute networks subnets describe "$name" --region "$region" || run compute networks subnets create "$name" --network "$name" --region "$region" --range 10.77.0.0/16 --enable-private-ip-google-access
has compute routers describe "$name" --region "$region" || run compute routers create "$name" --network "$name" --region "$region"
has compute routers nats describe "$name" --router "$name" --region "$region" || run compute routers nats create "$name" --router "$name" --region "$region" --auto-allocate-nat-external-ips --nat-custom-subnet-ip-ranges "$name"
if has compute firewall-rules describe "$name-ssh"; then
    run compute firewall-rules update "$name-ssh" --source-ranges "$ssh_from"
else
    run compute firewall-rules create "$name-ssh" --network "$name" --direction INGRESS --allow tcp:22 --source-ranges "$ssh_from" --target-service-accounts "$head"
fi
has compute firewall-rules describe "$name-nodes" || run compute firewall-rules create "$name-nodes" --network "$name" --direction INGRESS --allow all --source-service-accounts "$head,$worker" --target-service-accounts "$head,$worker"

create_or_update_role raydlGcpSpotSubnet "$here/subnet-role.yaml"
create_or_update_role raydlGcpSpotLook "$here/look-role.yaml"
create_or_update_role raydlGcpSpotHead "$here/head-role.yaml"
run compute networks subnets add-iam-policy-binding "$name" --region "$region" --member "serviceAccount:$head" --role "$subnet_role"
run projects add-iam-policy-binding "$project" --member "serviceAccount:$head" --role "$look_role" --condition None
run projects add-iam-policy-binding "$project" --member "serviceAccount:$head" --role "$head_role" --condition "$own_workers"
run iam service-accounts add-iam-policy-binding "$worker" --member "serviceAccount:$head" --role roles/iam.serviceAccountUser
run storage buckets add-iam-policy-binding "gs://$bucket" --member "serviceAccount:$head" --role roles/storage.objectUser
run storage buckets add-iam-policy-binding "gs://$bucket" --member "serviceAccount:$worker" --role roles/storage.objectViewer

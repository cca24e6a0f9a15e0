#!/bin/sh
# Installs the Debian packages that parts of this project use, where it can; else says what is lost.
# NO_APT=1: installs none, and says what is missing.
# Usage: tools/apt.sh [lab]    (lab: also an etcd, and what the Soft-RoCE lab takes, docs/research/without-gpu.md)
set -u

have() { command -v "$1" >/dev/null 2>&1 || [ -x "/usr/sbin/$1" ]; }

missing() {
  have ip && have tc || echo iproute2
  have c++ || echo g++
  [ -e /usr/include/infiniband/verbs.h ] || echo libibverbs-dev
  [ "$1" = lab ] || return
  have qemu-system-x86_64 || echo qemu-system-x86
  # A busybox that needs libraries can't start as the first process.
  { have busybox && ! ldd "$(command -v busybox)" >/dev/null 2>&1; } || echo busybox-static
  have tcpdump || echo tcpdump
  have chromium || echo chromium
  have nft || echo nftables
  have ib_write_bw || echo perftest
  have lldpd || echo lldpd
  have ucx_perftest || echo ucx-utils
  have ibv_rc_pingpong || echo ibverbs-utils
  have etcd || echo etcd-server
  have etcdctl || echo etcd-client
  have promtool || echo prometheus
  have slurmctld || echo slurmctld
  have slurmd || echo slurmd
  have srun || echo slurm-client
  have munged || echo munge
  have mpirun || echo openmpi-bin
  have buildah || echo buildah
  have debootstrap || echo debootstrap
  have sshd || echo openssh-server
  have ssh || echo openssh-client
  set -- /usr/lib/*/libibverbs/librxe-rdmav*.so
  [ -e "$1" ] || echo ibverbs-providers
  [ -d /usr/lib/python3/dist-packages/pyverbs ] || echo python3-pyverbs
}

install() { apt-get install -qq -y --no-install-recommends "$@" >/dev/null 2>&1; }

group=${1:-}
wanted=$(missing "$group")
[ -n "$wanted" ] || exit 0
if [ -z "${NO_APT:-}" ] && [ "$(id -u)" = 0 ] && have apt-get; then
  echo "installing Debian packages (NO_APT=1 installs none):" $wanted
  # shellcheck disable=SC2086
  install $wanted || {
    apt-get update -qq >/dev/null 2>&1
    # One that the archive has not should not keep the others away.
    install $wanted || for package in $wanted; do install "$package"; done
  }
fi

wanted=$(missing "$group")
[ -n "$wanted" ] || exit 0
echo "not installed (it takes root, apt-get, an archive that has them, and no NO_APT):"
status=0
for package in $wanted; do
  case $package in
    iproute2) cost="no network namespaces: the demo runs on loopback, tests of the fabric skip" ;;
    g++) cost="the extension can't be built" status=1 ;;
    libibverbs-dev) cost="queue pairs are neither seen nor steered; sockets are" ;;
    lldpd) cost="a test of LLDP's real output skips" ;;
    etcd-server | etcd-client) cost="tests of stores over an etcd skip" ;;
    chromium) cost="tests of the operator's page in a browser skip" ;;
    prometheus) cost="tests of alert rules, and of the exporter with a Prometheus, skip" ;;
    slurm* | munge) cost="tests of jobs that Slurm starts skip" ;;
    openmpi-bin) cost="a test of jobs that mpirun starts skips" ;;
    buildah | debootstrap) cost="a test of the exporter's image skips" ;;
    openssh-*) cost="tests of discovery over ssh skip" ;;
    nftables) cost="tests of marks that change on the way skip" ;;
    python3-pyverbs) cost="the lab does not test the limits of RDMA devices" ;;
    *) cost="the Soft-RoCE lab skips" ;;
  esac
  echo "  $package: without it $cost"
done
exit $status

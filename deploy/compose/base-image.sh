#!/usr/bin/env bash
# Makes the runtime's base image from Debian's packages, for machines without a registry. The image has the C
# library, the unwinder, the bundle of certificate authorities and a user, but no shell and no package manager.
# The script runs no command in the image, so it needs no container and no container network.
#
#   deploy/compose/base-image.sh [IMAGE]      the name of the image [default: millrace-base]
#   SUITE=bookworm deploy/compose/base-image.sh
#
# SUITE is a Debian release with a C library at least as new as that of the machine that builds the binary
# [default: this machine's release, or bookworm]. Needs root, mmdebstrap and a Docker Engine.
set -euo pipefail

fail() {
  echo "base-image: $*" >&2
  exit 1
}

host_suite() {
  # shellcheck disable=SC1091 # a file of the system
  (. /etc/os-release && [ "$ID" = debian ] && echo "$VERSION_CODENAME") 2>/dev/null || echo bookworm
}

suite=${SUITE:-$(host_suite)}
image=${1:-millrace-base}

[ "$(id -u)" = 0 ] || fail "not run as root: use sudo, because the image has files that belong to root"
command -v mmdebstrap >/dev/null || fail "mmdebstrap is missing: apt-get install mmdebstrap"
command -v docker >/dev/null || fail "docker is missing: apt-get install docker.io"
docker info >/dev/null 2>&1 || fail "the Docker Engine does not answer: see 'docker info'"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mmdebstrap --quiet --variant=extract --include=base-files,libc6,libgcc-s1,ca-certificates \
  "$suite" "$work/root"
cd "$work/root"

mkdir -p etc/ssl/certs
cat usr/share/ca-certificates/mozilla/*.crt >etc/ssl/certs/ca-certificates.crt
# Removes documentation and all other files of the packages that the binary does not need. Licences stay.
find usr/share -type f ! -name copyright -delete
find usr/share -type l -delete
find usr/share -depth -type d -empty -delete
rm -rf bin sbin usr/bin usr/sbin usr/games usr/include usr/src usr/lib/ssl usr/lib/*/gconv \
  usr/lib/*/engines-3 usr/lib/*/ossl-modules usr/lib/*/libcrypto.so* usr/lib/*/libssl.so* \
  var/lib var/cache etc/apt etc/dpkg etc/ca-certificates* etc/default etc/skel etc/profile.d etc/ssl/openssl.cnf
mkdir -p usr/bin usr/local/bin var/lib tmp
chmod 1777 tmp
cat >etc/passwd <<'PASSWD'
root:x:0:0:root:/:/nonexistent
millrace:x:10001:10001:Millrace:/var/lib/millrace:/nonexistent
PASSWD
printf 'root:x:0:\nmillrace:x:10001:\n' >etc/group
printf 'passwd: files\ngroup: files\nhosts: files dns\n' >etc/nsswitch.conf

tar --create --numeric-owner --one-file-system . | docker import \
  --change "LABEL org.opencontainers.image.base.name=debian:$suite" \
  --message "Debian $suite: libc6, libgcc-s1, ca-certificates" - "$image" >/dev/null
echo "$image: $(docker image inspect --format '{{.Size}}' "$image" | awk '{printf "%.1f MB", $1 / 1e6}')"

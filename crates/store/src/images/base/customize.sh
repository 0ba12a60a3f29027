# Run by mmdebstrap at the end of the default image's installation. $1 is the tree.
set -eu
root=$1
epoch=$2

# Shells start in every command of an agent: nothing in their profiles may start a program.
cat >"$root/etc/skel/.bashrc" <<'END'
case $- in *i*) ;; *) return ;; esac
HISTCONTROL=ignoreboth
PS1='\u@\h:\w\$ '
alias ls='ls --color=auto'
END
cp "$root/etc/skel/.bashrc" "$root/root/.bashrc"
rm -f "$root/etc/skel/.bash_logout"
printf '%s\n' '[ ! -f ~/.bashrc ] || . ~/.bashrc' | tee "$root/root/.profile" >"$root/etc/skel/.profile"

SOURCE_DATE_EPOCH=$epoch chroot "$root" useradd --uid 1000 --create-home --shell /bin/bash --groups sudo tl-user
# The agent, which is there in every machine, is sudo when called so.
ln -s /.torpor/agent "$root/usr/local/bin/sudo"
mkdir "$root/workspace"
chown 1000:1000 "$root/workspace"
chmod 0777 "$root/workspace"

# A sandbox is thrown away as a whole, so pip may install next to apt.
rm -f "$root"/usr/lib/python3*/EXTERNALLY-MANAGED

echo sandbox >"$root/etc/hostname"
printf '127.0.0.1 localhost sandbox\n::1 localhost\n' >"$root/etc/hosts"
: >"$root/etc/resolv.conf"
: >"$root/etc/machine-id"

# Settings of the host that built it (proxies) mean nothing inside.
rm -f "$root/etc/apt/apt.conf.d/99mmdebstrap"
find "$root/var/log" -type f -exec truncate --size 0 {} +
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb
rm -f "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old "$root/var/cache/ldconfig/aux-cache"

# Files of packages keep their times, which Python's compiled files refer to; all others get the
# same time in every build.
find "$root" -xdev ! -type d -newer "$root/.started" -exec touch --no-dereference --date="@$epoch" {} +
rm "$root/.started"

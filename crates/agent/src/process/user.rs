//! Users and groups of the machine, read from its own files: a static binary has no name service.

use std::collections::BTreeSet;

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Larger files are cut: a user may write them, and accounts are read for each process.
const FILE_MAX: u64 = 1024 * 1024;

/// Who a process runs as, or whom a file belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Account {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups, `gid` among them.
    pub(crate) groups: Vec<u32>,
    pub(crate) name: Option<String>,
    pub(crate) home: Option<String>,
    pub(crate) shell: Option<String>,
}

/// Who is not there.
#[derive(Debug)]
pub(crate) enum Missing {
    User(String),
    Group(String),
}

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::User(name) => write!(f, "no such user: {name}"),
            Self::Group(name) => write!(f, "no such group: {name}"),
        }
    }
}

/// The account meant by `wanted`: name, uid, name:group or uid:gid. The error names what is missing.
pub(crate) fn find(wanted: &str) -> Result<Account, Missing> {
    find_in(wanted, &read(PASSWD), &read(GROUP))
}

/// The account of whoever this process is, which has its groups already.
pub(crate) fn current() -> Account {
    let uid = rustix::process::geteuid().as_raw();
    let mut account = find_user(&uid.to_string(), &read(PASSWD)).unwrap_or_else(|| bare(uid));
    if uid == 0 && account.home.is_none() {
        account.home = Some("/root".to_owned());
    }
    account
}

/// The account with this number.
pub(crate) fn numbered(uid: u32) -> Account {
    // A name that is a number may be somebody else's.
    let found = find(&uid.to_string()).ok().filter(|account| account.uid == uid);
    found.unwrap_or_else(|| bare(uid))
}

/// Whether the account is in the group of this name.
pub(crate) fn is_member(account: &Account, group: &str) -> bool {
    find_group(group, &read(GROUP)).is_some_and(|gid| account.groups.contains(&gid))
}

/// A file of the machine's `/etc`; empty if it can't be read.
pub(crate) fn read(path: &str) -> String {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    let mut bytes = Vec::new();
    // A pipe in their place must not stop the agent.
    let file = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    // A machine without these files has numeric users only.
    let _ = file.and_then(|file| file.take(FILE_MAX).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A uid that nobody described: as containers do, it is in the root group.
fn bare(uid: u32) -> Account {
    Account { uid, gid: 0, groups: vec![0], name: None, home: None, shell: None }
}

fn find_in(wanted: &str, passwd: &str, group: &str) -> Result<Account, Missing> {
    let (user, wanted_group) = match wanted.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (wanted, None),
    };
    let mut account = find_user(user, passwd).ok_or_else(|| Missing::User(user.to_owned()))?;
    if let Some(wanted) = wanted_group {
        let gid = find_group(wanted, group).ok_or_else(|| Missing::Group(wanted.to_owned()))?;
        account.gid = gid;
        account.groups = vec![gid];
    } else {
        account.groups = groups_of(&account, group);
    }
    Ok(account)
}

fn find_user(wanted: &str, passwd: &str) -> Option<Account> {
    let number: Option<u32> = number(wanted);
    let mut by_number = None;
    for line in passwd.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, uid, gid, _, home, rest @ ..] = fields.as_slice() else { continue };
        let (Ok(uid), Ok(gid)) = (uid.parse(), gid.parse()) else { continue };
        let text = |value: &str| (!value.is_empty()).then(|| value.to_owned());
        let account = Account {
            uid,
            gid,
            groups: vec![gid],
            name: text(name),
            home: text(home),
            shell: rest.first().and_then(|shell| text(shell)),
        };
        if *name == wanted {
            return Some(account);
        }
        if number == Some(uid) && by_number.is_none() {
            by_number = Some(account);
        }
    }
    by_number.or_else(|| number.map(bare))
}

fn find_group(wanted: &str, group: &str) -> Option<u32> {
    let named = group.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(wanted)).then(|| fields.nth(1)?.parse().ok()).flatten()
    });
    named.or_else(|| number(wanted))
}

fn groups_of(account: &Account, group: &str) -> Vec<u32> {
    let mut groups = BTreeSet::from([account.gid]);
    for line in group.lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [_, _, gid, members, ..] = fields.as_slice() else { continue };
        let member = members.split(',').any(|member| Some(member) == account.name.as_deref());
        if let (true, Ok(gid)) = (member, gid.parse()) {
            groups.insert(gid);
        }
    }
    groups.into_iter().collect()
}

/// A user or group number; the largest one means "unchanged" to the kernel and is nobody's.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|number| digits && *number != u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken\n\
        bob:x:1000:1001:Bob,,,:/home/bob:/bin/sh\n";
    const GROUP: &str = "root:x:0:\nbob:x:1001:\ndocker:x:998:alice,bob\n";

    #[test]
    fn a_named_user_comes_with_home_and_groups() {
        let bob = find_in("bob", PASSWD, GROUP).unwrap();
        assert_eq!((bob.uid, bob.gid, bob.groups.as_slice()), (1000, 1001, &[998, 1001][..]));
        assert_eq!(bob.home.as_deref(), Some("/home/bob"));
        assert_eq!(find_in("1000", PASSWD, GROUP).unwrap(), bob);
    }

    #[test]
    fn a_named_group_replaces_the_others() {
        let bob = find_in("bob:docker", PASSWD, GROUP).unwrap();
        assert_eq!((bob.gid, bob.groups.as_slice()), (998, &[998][..]));
        let nobody = find_in("4242:4343", PASSWD, GROUP).unwrap();
        assert_eq!((nobody.uid, nobody.gid, nobody.name), (4242, 4343, None));
    }

    #[test]
    fn who_is_missing_is_named() {
        assert_eq!(find_in("eve", PASSWD, GROUP).unwrap_err().to_string(), "no such user: eve");
        assert_eq!(
            find_in("bob:eves", PASSWD, GROUP).unwrap_err().to_string(),
            "no such group: eves"
        );
        assert_eq!(find_in("", PASSWD, GROUP).unwrap_err().to_string(), "no such user: ");
        assert_eq!(
            find_in("4294967295", PASSWD, GROUP).unwrap_err().to_string(),
            "no such user: 4294967295"
        );
    }
}

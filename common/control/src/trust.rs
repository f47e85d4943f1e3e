//! The users whose server a client trusts.
//!
//! If another user made the socket, that user could pass messages on between the client and the
//! real server, and keep the region's descriptor. Without a secret it would even get the client's
//! keys and values. So a client first checks which user listens. It trusts root and its own user.
//! It also trusts the owner of the socket's folder, if no other user could have put that folder
//! there.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const ROOT: u32 = 0;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Whether a client trusts a server of this user at this socket.
pub(crate) fn may_serve(user: u32, socket: &Path) -> bool {
    let own_user = rustix::process::geteuid().as_raw();
    if user == ROOT || user == own_user {
        return true;
    }
    let Some(folder) = socket.parent() else { return false };
    let is_owner = fs::metadata(folder).is_ok_and(|found| found.uid() == user);
    // The folder behind a symbolic link counts too: it may be another user's.
    let real = fs::canonicalize(folder);
    is_owner
        && is_protected(folder, user, own_user)
        && real.is_ok_and(|real| is_protected(&real, user, own_user))
}

/// Whether only root, this process's user and `user` could have put a folder where it is.
fn is_protected(folder: &Path, user: u32, own_user: u32) -> bool {
    let pairs = folder.ancestors().zip(folder.ancestors().skip(1));
    let mut pairs = pairs.map(|(inner, outer)| Some((metadata(inner)?, metadata(outer)?)));
    pairs.all(|pair| {
        pair.is_some_and(|(inner, outer)| is_step_protected(&inner, &outer, user, own_user))
    })
}

fn metadata(path: &Path) -> Option<Metadata> {
    fs::metadata(path).ok()
}

/// Whether only root, this process's user and `user` could have put the folder `inner` into
/// `outer`.
fn is_step_protected(inner: &Metadata, outer: &Metadata, user: u32, own_user: u32) -> bool {
    let is_ours = |found: &Metadata| [ROOT, own_user].contains(&found.uid());
    // In a sticky folder, such as /tmp, all users make entries, but replace only their own.
    let is_sticky_and_ours = outer.mode() & STICKY != 0 && is_ours(inner);
    let is_writable = outer.mode() & WRITABLE_BY_OTHERS != 0;
    (is_ours(outer) || outer.uid() == user) && (!is_writable || is_sticky_and_ours)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    const OTHER: u32 = 54321;

    #[test]
    fn another_users_folder_is_trusted_only_where_that_user_could_not_put_it() {
        if !rustix::process::geteuid().is_root() {
            // Only root can change the owner of a file.
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str, mode, owner| {
            let path = folder.path().join(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            chown(&path, Some(owner), None).unwrap();
            path.join("kv.sock")
        };
        // A folder such as /run/farside.
        let of_server = make("farside", 0o750, OTHER);
        assert!(may_serve(OTHER, &of_server));
        assert!(!may_serve(OTHER + 1, &of_server));
        assert!(may_serve(0, &of_server), "root is always trusted");
        // A socket directly in /tmp, and one in a folder that another user made there.
        let shared = make("tmp", 0o1777, 0);
        assert!(!may_serve(OTHER, &shared));
        let of_other = make("tmp/farside", 0o755, OTHER);
        assert!(!may_serve(OTHER, &of_other));
        // Another user's link to the server's folder, and a link to the other user's folder.
        symlink(of_server.parent().unwrap(), folder.path().join("tmp/link")).unwrap();
        assert!(!may_serve(OTHER, &folder.path().join("tmp/link/kv.sock")));
        symlink(of_other.parent().unwrap(), folder.path().join("link")).unwrap();
        assert!(!may_serve(OTHER, &folder.path().join("link/kv.sock")));
    }
}

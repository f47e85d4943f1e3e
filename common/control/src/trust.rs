//! Whose server a client trusts with its secret.
//!
//! A client shows what it knows in its first message. If another user made the socket, that user
//! gets it, and with it a writer's descriptor from the real server. So a client looks first at the
//! user that listens. It trusts root, its own user, and the owner of the folder that has the socket
//! if no other user could have put that folder there.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const ROOT: u32 = 0;
const STICKY: u32 = 0o1000;
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Whether this user may have a server at this socket.
pub(crate) fn may_serve(user: u32, socket: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    if user == ROOT || user == own {
        return true;
    }
    let Some(folder) = socket.parent() else { return false };
    let is_owner = fs::metadata(folder).is_ok_and(|found| found.uid() == user);
    // Also where links lead, which may be another's.
    let real = fs::canonicalize(folder);
    is_owner && is_kept(folder, user, own) && real.is_ok_and(|real| is_kept(&real, user, own))
}

/// Whether only root, this process's user and `user` could have put a folder where it is.
fn is_kept(folder: &Path, user: u32, own: u32) -> bool {
    let pairs = folder.ancestors().zip(folder.ancestors().skip(1));
    let mut pairs = pairs.map(|(inner, outer)| Some((metadata(inner)?, metadata(outer)?)));
    pairs.all(|pair| pair.is_some_and(|(inner, outer)| is_step_kept(&inner, &outer, user, own)))
}

fn metadata(path: &Path) -> Option<Metadata> {
    fs::metadata(path).ok()
}

fn is_step_kept(inner: &Metadata, outer: &Metadata, user: u32, own: u32) -> bool {
    let is_ours = |found: &Metadata| [ROOT, own].contains(&found.uid());
    // In a sticky folder, such as /tmp, every user makes entries, and replaces none of another's.
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
    fn another_users_folder_counts_only_where_that_user_could_not_put_it() {
        if !rustix::process::geteuid().is_root() {
            // It takes root to give files away.
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
        // As /run/farside.
        let of_server = make("farside", 0o750, OTHER);
        assert!(may_serve(OTHER, &of_server));
        assert!(!may_serve(OTHER + 1, &of_server));
        assert!(may_serve(0, &of_server), "root is everywhere");
        // As the socket in /tmp, and as a folder that a stranger made there.
        let shared = make("tmp", 0o1777, 0);
        assert!(!may_serve(OTHER, &shared));
        let of_stranger = make("tmp/farside", 0o755, OTHER);
        assert!(!may_serve(OTHER, &of_stranger));
        // A stranger's link to what would do.
        symlink(of_server.parent().unwrap(), folder.path().join("tmp/link")).unwrap();
        assert!(!may_serve(OTHER, &folder.path().join("tmp/link/kv.sock")));
        symlink(of_stranger.parent().unwrap(), folder.path().join("link")).unwrap();
        assert!(!may_serve(OTHER, &folder.path().join("link/kv.sock")));
    }
}

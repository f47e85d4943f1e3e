//! Names of processes and files.
//!
//! A record names where the region of a copy is. From the name of a process another server of the
//! host sees whether the process has ended, and its memory with it. The name of a file tells a
//! region file from a copy of it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;

use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// Returns the id of this boot of the host.
///
/// # Errors
/// The system's error.
pub(super) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Returns the name of this process.
///
/// # Errors
/// The system's error.
pub(super) fn own_process() -> io::Result<String> {
    let pid = std::process::id();
    Ok(format!("{} {} {pid} {}", boot_id()?, pid_namespace()?, own_start()?))
}

/// Returns when this process began, in ticks since the boot.
///
/// # Errors
/// The system's error.
pub(crate) fn own_start() -> io::Result<u64> {
    Ok(stat(std::process::id())?.ok_or(io::ErrorKind::NotFound)?.started)
}

/// Returns the name of a file.
///
/// # Errors
/// The system's error.
pub(super) fn file(file: &File) -> io::Result<String> {
    let metadata = file.metadata()?;
    Ok(format!("{} {} {}", boot_id()?, metadata.dev(), metadata.ino()))
}

/// Whether the process of this name has certainly ended. Never true for a process of another host
/// or of another namespace, of which this process knows nothing.
pub(super) fn has_ended(process: &str) -> bool {
    let parts: Vec<&str> = process.split(' ').collect();
    let [boot, namespace, pid, started] = parts[..] else { return false };
    let is_near =
        boot_id().is_ok_and(|own| own == boot) && pid_namespace().is_ok_and(|own| own == namespace);
    let (Ok(pid), Ok(started)) = (pid.parse::<u32>(), started.parse::<u64>()) else {
        return false;
    };
    let Some(id) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    // The kernel is asked first: /proc may hide the processes of other users.
    is_near
        && (test_kill_process(id) == Err(Errno::SRCH)
            || stat(pid)
                .is_ok_and(|stat| stat.is_some_and(|stat| stat.started != started || stat.is_dead)))
}

fn pid_namespace() -> io::Result<String> {
    Ok(fs::read_link("/proc/self/ns/pid")?.display().to_string())
}

/// What the system knows of a process.
struct Stat {
    /// When the process began, in ticks since the boot.
    started: u64,
    /// It has ended, but its parent has not asked for its exit code yet.
    is_dead: bool,
}

/// Returns `None` for a process that does not exist or is hidden.
fn stat(pid: u32) -> io::Result<Option<Stat>> {
    let text = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // The name of the program is in parentheses, and may have any characters in it.
    let fields: Vec<&str> =
        text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let (Some(state), Some(started)) = (fields.first(), fields.get(19)) else { return Ok(None) };
    let Ok(started) = started.parse() else { return Ok(None) };
    // While other threads of the process end, the memory may still be in use.
    let is_alone =
        || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|tasks| tasks.count() == 1);
    let is_dead = ["Z", "X"].contains(state) && is_alone();
    Ok(Some(Stat { started, is_dead }))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_has_ended_only_if_it_is_of_this_host_and_gone() {
        let own = own_process().unwrap();
        assert!(!has_ended(&own));
        let parts: Vec<&str> = own.split(' ').collect();
        let named = |boot: &str, namespace: &str, pid: u32, started: &str| {
            has_ended(&format!("{boot} {namespace} {pid} {started}"))
        };
        let (boot, namespace, started) = (parts[0], parts[1], parts[3]);
        // Another process that had this id before.
        assert!(named(boot, namespace, std::process::id(), "1"));
        assert!(!named("other", namespace, std::process::id(), "1"));
        assert!(!named(boot, "pid:[1]", std::process::id(), "1"));
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let child_started = stat(child.id()).unwrap().unwrap().started.to_string();
        let name = format!("{boot} {namespace} {} {child_started}", child.id());
        assert!(!has_ended(&name));
        child.kill().unwrap();
        while !stat(child.id()).unwrap().unwrap().is_dead {}
        assert!(has_ended(&name), "its exit code was not asked for");
        child.wait().unwrap();
        assert!(has_ended(&name));
        assert!(!has_ended("") && !has_ended(started));
    }

    #[test]
    fn a_copy_of_a_file_has_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|name| folder.path().join(name));
        let open = |path| file(&File::open(path).unwrap()).unwrap();
        fs::write(&one, "region").unwrap();
        fs::copy(&one, &two).unwrap();
        assert_ne!(open(&one), open(&two));
        let before = open(&one);
        fs::rename(&one, folder.path().join("moved")).unwrap();
        assert_eq!(open(&folder.path().join("moved")), before);
    }
}

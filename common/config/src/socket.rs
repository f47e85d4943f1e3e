//! The permissions and the group of a server's socket.

use std::fmt;
use std::str::FromStr;

use super::{ConfigError, ServerConfig, bad_value};

/// The file with the groups of this machine.
const GROUPS_FILE: &str = "/etc/group";
/// The greatest mode of a socket: all permission bits.
const MODE_MAX: u32 = 0o777;

/// The permissions of a socket, such as 0660. Connecting needs write permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketMode(pub u32);

impl FromStr for SocketMode {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let is_octal = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let mode = if is_octal { u32::from_str_radix(text, 8).ok() } else { None };
        match mode.filter(|mode| *mode <= MODE_MAX) {
            Some(mode) => Ok(Self(mode)),
            None => Err(bad_value("socket_mode", text, "write octal digits, such as \"0660\"")),
        }
    }
}

/// The number of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketGroup(pub u32);

impl FromStr for SocketGroup {
    type Err = ConfigError;

    /// Parses a number, or a name in /etc/group.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if let Ok(number) = text.parse() {
            return Ok(Self(number));
        }
        let groups = std::fs::read_to_string(GROUPS_FILE).unwrap_or_default();
        number_of(text, &groups).map(Self).ok_or_else(|| {
            let advice = format!("{GROUPS_FILE} has no such group: write its number, or another");
            bad_value("socket_group", text, advice)
        })
    }
}

/// Returns the number of the group with this name. `groups` has lines such as
/// `farside:x:998:app,web`.
fn number_of(name: &str, groups: &str) -> Option<u32> {
    let mut lines = groups.lines().map(|line| line.split(':'));
    let number = |mut fields: std::str::Split<'_, char>| fields.nth(1)?.parse().ok();
    lines.find_map(|mut fields| if fields.next() == Some(name) { number(fields) } else { None })
}

/// Refuses the keys about the socket, which exists only on shared memory.
pub(super) fn refuse_without_socket(config: &ServerConfig) -> Result<(), ConfigError> {
    let advice = "it is for an address such as shm:///run/farside/kv.sock: leave it out";
    if let Some(mode) = config.socket_mode {
        return Err(bad_value("socket_mode", mode, advice));
    }
    match config.socket_group {
        Some(group) => Err(bad_value("socket_group", group.0, advice)),
        None => Ok(()),
    }
}

impl fmt::Display for SocketMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal_and_groups_have_names_or_numbers() {
        for (text, mode) in [("0660", 0o660), ("777", 0o777), ("0", 0)] {
            assert_eq!(text.parse::<SocketMode>().unwrap(), SocketMode(mode));
        }
        for text in ["", "0o660", "1777", "0668", "-1", "+660", "rw"] {
            let line = text.parse::<SocketMode>().unwrap_err().to_string();
            assert!(line.contains("socket_mode") && line.contains("\"0660\""), "{line}");
        }
        let groups = "root:x:0:\nbroken\nno:x:number:\nfarside:x:998:app,web\n";
        assert_eq!(number_of("farside", groups), Some(998));
        for name in ["app", "broken", "no", "x", ""] {
            assert_eq!(number_of(name, groups), None);
        }
        assert_eq!("998".parse::<SocketGroup>().unwrap(), SocketGroup(998));
        let line = "no such group".parse::<SocketGroup>().unwrap_err().to_string();
        assert!(line.contains("/etc/group has no such group"), "{line}");
    }

    #[test]
    fn socket_keys_are_refused_without_a_socket() {
        let mut config = ServerConfig {
            listen: vec!["rdma://10.9.0.1:7400".parse().unwrap()],
            socket_mode: Some(SocketMode(0o660)),
            ..Default::default()
        };
        let line = config.validate().unwrap_err().to_string();
        assert!(line.starts_with("socket_mode = 0660: it is for"), "{line}");
        (config.socket_mode, config.socket_group) = (None, Some(SocketGroup(7)));
        assert!(config.validate().unwrap_err().to_string().starts_with("socket_group = 7"));
    }
}

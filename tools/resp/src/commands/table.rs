//! The commands: their names, what COMMAND says about them, and how many arguments they take.

/// A command of the gateway.
#[expect(clippy::enum_variant_names, reason = "redis has a command of this name")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Command {
    Get,
    Set,
    SetNx,
    SetEx,
    PSetEx,
    GetSet,
    GetDel,
    GetEx,
    GetRange,
    StrLen,
    Append,
    Incr,
    Decr,
    IncrBy,
    DecrBy,
    MGet,
    MSet,
    Del,
    Unlink,
    Exists,
    Touch,
    Type,
    Ttl,
    PTtl,
    ExpireTime,
    PExpireTime,
    Expire,
    PExpire,
    ExpireAt,
    PExpireAt,
    Persist,
    Scan,
    Keys,
    RandomKey,
    DbSize,
    FlushDb,
    FlushAll,
    Ping,
    Echo,
    Hello,
    Auth,
    Select,
    Quit,
    Reset,
    Client,
    Config,
    Command,
    Info,
    Memory,
    Time,
}

/// What is known about a command. All fields are those of redis' COMMAND INFO and COMMAND DOCS.
pub(crate) struct CommandSpec {
    pub(crate) command: Command,
    pub(crate) name: &'static str,
    /// The number of arguments with the name; negative if there may be more.
    pub(crate) arity: i32,
    /// Between spaces.
    pub(crate) flags: &'static str,
    /// The first key, the last one (-1 for the last argument), and the step between keys.
    pub(crate) keys: (i32, i32, i32),
    /// The categories, between spaces.
    pub(crate) categories: &'static str,
    pub(crate) group: &'static str,
    pub(crate) since: &'static str,
    pub(crate) summary: &'static str,
}

impl CommandSpec {
    /// Whether the command may have this many arguments, with its name.
    pub(crate) fn takes(&self, count: usize) -> bool {
        let least = self.arity.unsigned_abs() as usize;
        if self.arity < 0 { count >= least } else { count == least }
    }

    /// Whether a client that has not given its password may use the command.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.command, Command::Auth | Command::Hello | Command::Quit | Command::Reset)
    }
}

/// The longest name of a command, in bytes.
const NAME_BYTES_MAX: usize = 11;

/// Finds a command by its name, in letters of any case.
#[inline]
pub(crate) fn find(name: &[u8]) -> Option<&'static CommandSpec> {
    // The two most frequent ones first.
    match name {
        b"GET" | b"get" => return Some(&COMMANDS[Command::Get as usize]),
        b"SET" | b"set" => return Some(&COMMANDS[Command::Set as usize]),
        _ if name.len() > NAME_BYTES_MAX => return None,
        _ => {}
    }
    COMMANDS.iter().find(|spec| spec.name.as_bytes().eq_ignore_ascii_case(name))
}

/// All commands, in the order of [`Command`].
#[rustfmt::skip]
pub(crate) const COMMANDS: &[CommandSpec] = &[
    CommandSpec {
        command: Command::Get, name: "get", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@read @string @fast", group: "string", since: "1.0.0",
        summary: "Returns the value of a key",
    },
    CommandSpec {
        command: Command::Set, name: "set", arity: -3,
        flags: "write denyoom", keys: (1, 1, 1),
        categories: "@write @string @slow", group: "string", since: "1.0.0",
        summary: "Stores a value",
    },
    CommandSpec {
        command: Command::SetNx, name: "setnx", arity: 3,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "1.0.0",
        summary: "Stores a value if the key is absent",
    },
    CommandSpec {
        command: Command::SetEx, name: "setex", arity: 4,
        flags: "write denyoom", keys: (1, 1, 1),
        categories: "@write @string @slow", group: "string", since: "2.0.0",
        summary: "Stores a value that expires, in seconds",
    },
    CommandSpec {
        command: Command::PSetEx, name: "psetex", arity: 4,
        flags: "write denyoom", keys: (1, 1, 1),
        categories: "@write @string @slow", group: "string", since: "2.6.0",
        summary: "Stores a value that expires, in milliseconds",
    },
    CommandSpec {
        command: Command::GetSet, name: "getset", arity: 3,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "1.0.0",
        summary: "Stores a value and returns the one before",
    },
    CommandSpec {
        command: Command::GetDel, name: "getdel", arity: 2,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "6.2.0",
        summary: "Removes a key and returns its value",
    },
    CommandSpec {
        command: Command::GetEx, name: "getex", arity: -2,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "6.2.0",
        summary: "Returns a value and changes its expiry",
    },
    CommandSpec {
        command: Command::GetRange, name: "getrange", arity: 4,
        flags: "readonly", keys: (1, 1, 1),
        categories: "@read @string @slow", group: "string", since: "2.4.0",
        summary: "Returns a part of a value",
    },
    CommandSpec {
        command: Command::StrLen, name: "strlen", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@read @string @fast", group: "string", since: "2.2.0",
        summary: "Returns the length of a value",
    },
    CommandSpec {
        command: Command::Append, name: "append", arity: 3,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "2.0.0",
        summary: "Appends to a value",
    },
    CommandSpec {
        command: Command::Incr, name: "incr", arity: 2,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "1.0.0",
        summary: "Adds one to a number",
    },
    CommandSpec {
        command: Command::Decr, name: "decr", arity: 2,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "1.0.0",
        summary: "Subtracts one from a number",
    },
    CommandSpec {
        command: Command::IncrBy, name: "incrby", arity: 3,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "1.0.0",
        summary: "Adds to a number",
    },
    CommandSpec {
        command: Command::DecrBy, name: "decrby", arity: 3,
        flags: "write denyoom fast", keys: (1, 1, 1),
        categories: "@write @string @fast", group: "string", since: "1.0.0",
        summary: "Subtracts from a number",
    },
    CommandSpec {
        command: Command::MGet, name: "mget", arity: -2,
        flags: "readonly fast", keys: (1, -1, 1),
        categories: "@read @string @fast", group: "string", since: "1.0.0",
        summary: "Returns the values of several keys",
    },
    CommandSpec {
        command: Command::MSet, name: "mset", arity: -3,
        flags: "write denyoom", keys: (1, -1, 2),
        categories: "@write @string @slow", group: "string", since: "1.0.1",
        summary: "Stores several values, one after the other",
    },
    CommandSpec {
        command: Command::Del, name: "del", arity: -2,
        flags: "write", keys: (1, -1, 1),
        categories: "@keyspace @write @slow", group: "generic", since: "1.0.0",
        summary: "Removes keys",
    },
    CommandSpec {
        command: Command::Unlink, name: "unlink", arity: -2,
        flags: "write fast", keys: (1, -1, 1),
        categories: "@keyspace @write @fast", group: "generic", since: "4.0.0",
        summary: "Removes keys",
    },
    CommandSpec {
        command: Command::Exists, name: "exists", arity: -2,
        flags: "readonly fast", keys: (1, -1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "1.0.0",
        summary: "Counts the keys that are present",
    },
    CommandSpec {
        command: Command::Touch, name: "touch", arity: -2,
        flags: "readonly fast", keys: (1, -1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "3.2.1",
        summary: "Counts the keys that are present",
    },
    CommandSpec {
        command: Command::Type, name: "type", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "1.0.0",
        summary: "Returns the type of a value: string",
    },
    CommandSpec {
        command: Command::Ttl, name: "ttl", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "1.0.0",
        summary: "Returns the seconds until a value expires",
    },
    CommandSpec {
        command: Command::PTtl, name: "pttl", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "2.6.0",
        summary: "Returns the milliseconds until a value expires",
    },
    CommandSpec {
        command: Command::ExpireTime, name: "expiretime", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "7.0.0",
        summary: "Returns when a value expires, in seconds since 1970",
    },
    CommandSpec {
        command: Command::PExpireTime, name: "pexpiretime", arity: 2,
        flags: "readonly fast", keys: (1, 1, 1),
        categories: "@keyspace @read @fast", group: "generic", since: "7.0.0",
        summary: "Returns when a value expires, in milliseconds since 1970",
    },
    CommandSpec {
        command: Command::Expire, name: "expire", arity: -3,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@keyspace @write @fast", group: "generic", since: "1.0.0",
        summary: "Lets a value expire, in seconds",
    },
    CommandSpec {
        command: Command::PExpire, name: "pexpire", arity: -3,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@keyspace @write @fast", group: "generic", since: "2.6.0",
        summary: "Lets a value expire, in milliseconds",
    },
    CommandSpec {
        command: Command::ExpireAt, name: "expireat", arity: -3,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@keyspace @write @fast", group: "generic", since: "1.2.0",
        summary: "Lets a value expire at a second since 1970",
    },
    CommandSpec {
        command: Command::PExpireAt, name: "pexpireat", arity: -3,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@keyspace @write @fast", group: "generic", since: "2.6.0",
        summary: "Lets a value expire at a millisecond since 1970",
    },
    CommandSpec {
        command: Command::Persist, name: "persist", arity: 2,
        flags: "write fast", keys: (1, 1, 1),
        categories: "@keyspace @write @fast", group: "generic", since: "2.2.0",
        summary: "Lets a value stay",
    },
    CommandSpec {
        command: Command::Scan, name: "scan", arity: -2,
        flags: "readonly", keys: (0, 0, 0),
        categories: "@keyspace @read @slow", group: "generic", since: "2.8.0",
        summary: "Returns some keys, and where to go on",
    },
    CommandSpec {
        command: Command::Keys, name: "keys", arity: 2,
        flags: "readonly", keys: (0, 0, 0),
        categories: "@keyspace @read @slow @dangerous", group: "generic", since: "1.0.0",
        summary: "Returns the keys that match a pattern",
    },
    CommandSpec {
        command: Command::RandomKey, name: "randomkey", arity: 1,
        flags: "readonly", keys: (0, 0, 0),
        categories: "@keyspace @read @slow", group: "generic", since: "1.0.0",
        summary: "Returns some key",
    },
    CommandSpec {
        command: Command::DbSize, name: "dbsize", arity: 1,
        flags: "readonly fast", keys: (0, 0, 0),
        categories: "@keyspace @read @fast", group: "server", since: "1.0.0",
        summary: "Counts all keys",
    },
    CommandSpec {
        command: Command::FlushDb, name: "flushdb", arity: -1,
        flags: "write", keys: (0, 0, 0),
        categories: "@keyspace @write @slow @dangerous", group: "server", since: "1.0.0",
        summary: "Removes all keys",
    },
    CommandSpec {
        command: Command::FlushAll, name: "flushall", arity: -1,
        flags: "write", keys: (0, 0, 0),
        categories: "@keyspace @write @slow @dangerous", group: "server", since: "1.0.0",
        summary: "Removes all keys",
    },
    CommandSpec {
        command: Command::Ping, name: "ping", arity: -1,
        flags: "fast", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "1.0.0",
        summary: "Answers",
    },
    CommandSpec {
        command: Command::Echo, name: "echo", arity: 2,
        flags: "loading stale fast", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "1.0.0",
        summary: "Returns its argument",
    },
    CommandSpec {
        command: Command::Hello, name: "hello", arity: -1,
        flags: "noscript loading stale fast no_auth allow_busy", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "6.0.0",
        summary: "Chooses the protocol",
    },
    CommandSpec {
        command: Command::Auth, name: "auth", arity: -2,
        flags: "noscript loading stale fast no_auth allow_busy", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "1.0.0",
        summary: "Takes the password",
    },
    CommandSpec {
        command: Command::Select, name: "select", arity: 2,
        flags: "loading stale fast", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "1.0.0",
        summary: "Chooses database 0",
    },
    CommandSpec {
        command: Command::Quit, name: "quit", arity: -1,
        flags: "noscript loading stale fast no_auth allow_busy", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "1.0.0",
        summary: "Ends the connection",
    },
    CommandSpec {
        command: Command::Reset, name: "reset", arity: 1,
        flags: "noscript loading stale fast no_auth allow_busy", keys: (0, 0, 0),
        categories: "@fast @connection", group: "connection", since: "6.2.0",
        summary: "Resets the connection",
    },
    CommandSpec {
        command: Command::Client, name: "client", arity: -2,
        flags: "", keys: (0, 0, 0),
        categories: "@slow", group: "connection", since: "2.4.0",
        summary: "Shows and names connections",
    },
    CommandSpec {
        command: Command::Config, name: "config", arity: -2,
        flags: "", keys: (0, 0, 0),
        categories: "@slow", group: "server", since: "2.0.0",
        summary: "Shows settings",
    },
    CommandSpec {
        command: Command::Command, name: "command", arity: -1,
        flags: "loading stale", keys: (0, 0, 0),
        categories: "@slow @connection", group: "server", since: "2.8.13",
        summary: "Shows the commands",
    },
    CommandSpec {
        command: Command::Info, name: "info", arity: -1,
        flags: "loading stale", keys: (0, 0, 0),
        categories: "@slow @dangerous", group: "server", since: "1.0.0",
        summary: "Shows statistics",
    },
    CommandSpec {
        command: Command::Memory, name: "memory", arity: -2,
        flags: "", keys: (0, 0, 0),
        categories: "@slow", group: "server", since: "4.0.0",
        summary: "Shows the memory of a key",
    },
    CommandSpec {
        command: Command::Time, name: "time", arity: 1,
        flags: "loading stale fast", keys: (0, 0, 0),
        categories: "@fast", group: "server", since: "2.6.0",
        summary: "Returns the gateway's time",
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_commands() {
        for (number, spec) in COMMANDS.iter().enumerate() {
            assert_eq!(spec.command as usize, number, "{}", spec.name);
            assert!(spec.name.len() <= NAME_BYTES_MAX);
            let name = spec.name.to_uppercase();
            assert_eq!(find(name.as_bytes()).map(|found| found.name), Some(spec.name));
        }
        assert!(find(b"lpush").is_none() && find(b"").is_none());
    }
}

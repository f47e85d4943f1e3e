//! Commands about the connection itself, MULTI included, which ask nothing of the store.

use std::time::{SystemTime, UNIX_EPOCH};

use farside_resp::{Protocol, ReplyWriter, parse_integer};

use super::introspection::{self, REDIS_VERSION};
use super::table::{Command, CommandSpec};
use super::{Arguments, ClientState, checked_name, error};
use crate::gateway::Gateway;

/// The only user.
const USER: &[u8] = b"default";

const HELLO_NEEDS_AUTH: &str = "NOAUTH HELLO must be called with the client already \
    authenticated, otherwise the HELLO \
     <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP \
     protocol version at the same time";

/// Runs the command, if it is one of these; otherwise returns false.
pub(crate) fn run(
    spec: &CommandSpec,
    arguments: &impl Arguments,
    gateway: &Gateway,
    state: &mut ClientState,
    out: &mut Vec<u8>,
) -> bool {
    let mut reply = ReplyWriter::new(out, state.protocol);
    match spec.command {
        Command::Ping => ping(arguments, &mut reply),
        Command::Echo => reply.bulk(arguments.get(1)),
        Command::Time => time(&mut reply),
        Command::Select => select(arguments, &mut reply),
        Command::Quit => {
            reply.ok();
            state.is_closing = true;
        }
        Command::Reset => {
            reply.simple("RESET");
            state.set_protocol(Protocol::Two);
            state.is_authenticated = gateway.password.is_none();
            state.is_in_transaction = false;
            state.record.name().clear();
        }
        Command::Auth => match authenticate(arguments, gateway, state) {
            Ok(()) => {
                state.is_authenticated = true;
                reply.ok();
            }
            Err(error) => reply.error(error),
        },
        Command::Hello => match hello(arguments, gateway, state) {
            Ok(()) => greet(state, out),
            Err(error) => reply.error(error),
        },
        Command::Client => introspection::client(arguments, gateway, state, &mut reply),
        Command::Config => introspection::config(arguments, gateway, &mut reply),
        Command::Command => introspection::command(arguments, &mut reply),
        Command::Info => introspection::info(arguments, gateway, &mut reply),
        _ => return false,
    }
    true
}

fn ping(arguments: &impl Arguments, reply: &mut ReplyWriter<'_>) {
    match arguments.count() {
        1 => reply.simple("PONG"),
        2 => reply.bulk(arguments.get(1)),
        _ => reply.error(error::wrong_arity("ping")),
    }
}

fn time(reply: &mut ReplyWriter<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    reply.array(2);
    reply.bulk(now.as_secs().to_string());
    reply.bulk(now.subsec_micros().to_string());
}

fn select(arguments: &impl Arguments, reply: &mut ReplyWriter<'_>) {
    match parse_integer(arguments.get(1)).map(i32::try_from) {
        Some(Ok(0)) => reply.ok(),
        Some(Ok(_)) => reply.error("ERR DB index is out of range"),
        Some(Err(_)) => reply.error(error::NO_INDEX),
        None => reply.error(error::NOT_AN_INTEGER),
    }
}

/// AUTH: with a password, or with a user and a password.
fn authenticate(
    arguments: &impl Arguments,
    gateway: &Gateway,
    state: &mut ClientState,
) -> Result<(), &'static str> {
    let (user, password) = match arguments.count() {
        2 if gateway.password.is_none() => return Err(error::NO_PASSWORD_SET),
        2 => (USER, arguments.get(1)),
        3 => (arguments.get(1), arguments.get(2)),
        _ => return Err(error::SYNTAX),
    };
    check(gateway, state, user, password)
}

/// Checks a password. A client learns only in the next second that one was wrong, so that it cannot
/// try many.
fn check(
    gateway: &Gateway,
    state: &mut ClientState,
    user: &[u8],
    password: &[u8],
) -> Result<(), &'static str> {
    if user == USER && gateway.accepts(password) {
        return Ok(());
    }
    state.is_delayed = true;
    gateway.note_wrong_password(&state.record);
    Err(error::WRONG_PASSWORD)
}

fn hello(
    arguments: &impl Arguments,
    gateway: &Gateway,
    state: &mut ClientState,
) -> Result<(), String> {
    let mut protocol = None;
    if arguments.count() > 1 {
        let number = parse_integer(arguments.get(1))
            .ok_or_else(|| "ERR Protocol version is not an integer or out of range".to_owned())?;
        protocol = Some(match number {
            2 => Protocol::Two,
            3 => Protocol::Three,
            _ => return Err("NOPROTO unsupported protocol version".to_owned()),
        });
    }
    let (mut at, count) = (2, arguments.count());
    let (mut credentials, mut name) = (None, None);
    while at < count {
        let more = count - 1 - at;
        if arguments.is(at, "AUTH") && more >= 2 {
            credentials = Some((arguments.get(at + 1), arguments.get(at + 2)));
            at += 2;
        } else if arguments.is(at, "SETNAME") && more >= 1 {
            name = Some(checked_name(arguments.get(at + 1))?);
            at += 1;
        } else {
            let option = String::from_utf8_lossy(arguments.get(at));
            return Err(format!("ERR Syntax error in HELLO option '{option}'"));
        }
        at += 1;
    }
    if let Some((user, password)) = credentials {
        check(gateway, state, user, password)?;
        state.is_authenticated = true;
    }
    if !state.is_authenticated {
        return Err(HELLO_NEEDS_AUTH.to_owned());
    }
    if let Some(name) = name {
        name.clone_into(&mut state.record.name());
    }
    if let Some(protocol) = protocol {
        state.set_protocol(protocol);
    }
    Ok(())
}

/// The answer to HELLO, in the protocol that it has chosen.
fn greet(state: &ClientState, out: &mut Vec<u8>) {
    let mut reply = ReplyWriter::new(out, state.protocol);
    reply.map(7);
    reply.bulk("server");
    reply.bulk("redis");
    reply.bulk("version");
    reply.bulk(REDIS_VERSION);
    reply.bulk("proto");
    reply.integer(if state.protocol == Protocol::Two { 2 } else { 3 });
    reply.bulk("id");
    reply.integer(state.record.id as i64);
    reply.bulk("mode");
    reply.bulk("standalone");
    reply.bulk("role");
    reply.bulk("master");
    reply.bulk("modules");
    reply.array(0);
}

const REFUSED: &str = "ERR there are no transactions here, so this command between MULTI and EXEC \
    was not executed: send it without MULTI";
const ABORTED: &str = "EXECABORT Transaction discarded: there are no transactions here, and none \
    of its commands was executed";

/// The reply of MULTI, EXEC and DISCARD, and of any other command between MULTI and EXEC: a simple
/// string or an error. `None` if the command is to be executed.
///
/// There are no transactions, so nothing between MULTI and EXEC is executed. MULTI itself succeeds.
/// Most clients send a whole transaction at once, and all of them send EXEC or DISCARD at its end
/// only if MULTI has succeeded. If it failed, the gateway could not know which of the commands
/// behind it belong to the transaction.
pub(crate) fn in_transaction(
    arguments: &impl Arguments,
    state: &mut ClientState,
) -> Option<Result<&'static str, String>> {
    let is_open = state.is_in_transaction;
    let named = ["multi", "exec", "discard"].into_iter().find(|name| arguments.is(0, name));
    let Some(name) = named else {
        let leaves = arguments.is(0, "quit") || arguments.is(0, "reset");
        return (is_open && !leaves).then(|| Err(REFUSED.to_owned()));
    };
    Some(match name {
        _ if !state.is_authenticated => Err(error::NO_AUTH.to_owned()),
        _ if arguments.count() != 1 => Err(error::wrong_arity(name)),
        "multi" if is_open => Err("ERR MULTI calls can not be nested".to_owned()),
        "exec" | "discard" if !is_open => Err(format!("ERR {} without MULTI", name.to_uppercase())),
        _ => {
            state.is_in_transaction = name == "multi";
            if name == "exec" { Err(ABORTED.to_owned()) } else { Ok("OK") }
        }
    })
}

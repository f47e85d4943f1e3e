//! CLIENT, CONFIG and COMMAND.

use std::collections::HashSet;

use farside_resp::{ReplyWriter, matches, parse_integer};

use super::arguments::Arguments;
use super::client_state::{ClientState, set_name};
use super::table::{COMMANDS, CommandSpec, find};
use super::{error, info};
use crate::gateway::Gateway;

/// Finds the subcommand, and checks the number of its arguments: a negative one is the least.
pub(crate) fn subcommand(
    arguments: &impl Arguments,
    command: &str,
    known: &[(&'static str, i32)],
) -> Result<&'static str, Vec<u8>> {
    let named = known.iter().find(|(name, _)| arguments.is(1, name));
    let Some((name, arity)) = named else {
        return Err(error::unknown_subcommand(command, arguments.get(1)));
    };
    let least = arity.unsigned_abs() as usize;
    let count = arguments.count();
    if count == least || *arity < 0 && count > least {
        return Ok(name);
    }
    Err(error::wrong_arity(&format!("{command}|{name}")).into_bytes())
}

/// Checks the arguments of MEMORY USAGE.
pub(crate) fn check_memory_usage(arguments: &impl Arguments) -> Result<(), Vec<u8>> {
    subcommand(arguments, "memory", &[("usage", -3)])?;
    if arguments.count() == 3 {
        return Ok(());
    }
    let is_samples = arguments.count() == 5 && arguments.is(3, "SAMPLES");
    // The number of samples makes no difference for a string.
    match parse_integer(arguments.get(4)).filter(|_| is_samples) {
        Some(0..) => Ok(()),
        None if is_samples => Err(error::NOT_AN_INTEGER.into()),
        _ => Err(error::SYNTAX.into()),
    }
}

/// CLIENT.
pub(crate) fn client(
    arguments: &impl Arguments,
    gateway: &Gateway,
    state: &ClientState,
    reply: &mut ReplyWriter<'_>,
) {
    let known =
        [("id", 2), ("getname", 2), ("setname", 3), ("setinfo", 4), ("list", -2), ("info", 2)];
    match subcommand(arguments, "client", &known) {
        Ok("id") => reply.integer(state.record.id as i64),
        Ok("getname") => {
            let name = state.record.name();
            if name.is_empty() { reply.null() } else { reply.bulk(name.as_bytes()) }
        }
        Ok("setname") => match set_name(state, arguments.get(2)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(error),
        },
        Ok("setinfo") if arguments.is(2, "LIB-NAME") || arguments.is(2, "LIB-VER") => reply.ok(),
        Ok("setinfo") => {
            let option = String::from_utf8_lossy(arguments.get(2));
            reply.error(format!("ERR Unrecognized option '{option}'"));
        }
        Ok("info") => reply.verbatim(&info::client_line(&state.record)),
        Ok(_) => match list(arguments, gateway) {
            Ok(lines) => reply.verbatim(&lines),
            Err(error) => reply.error(error),
        },
        Err(error) => reply.error(error),
    }
}

/// CLIENT LIST, of all connections or those that are named.
fn list(arguments: &impl Arguments, gateway: &Gateway) -> Result<String, String> {
    let records = gateway.records();
    let count = arguments.count();
    let lines = |is_in: &dyn Fn(u64) -> bool| {
        let wanted = records.iter().filter(|record| is_in(record.id));
        wanted.map(|record| info::client_line(record)).collect()
    };
    match count {
        2 => Ok(lines(&|_| true)),
        4 if arguments.is(2, "TYPE") => {
            let others = ["master", "replica", "slave", "pubsub"];
            if arguments.is(3, "normal") {
                Ok(lines(&|_| true))
            } else if others.iter().any(|kind| arguments.is(3, kind)) {
                Ok(String::new())
            } else {
                let kind = String::from_utf8_lossy(arguments.get(3));
                Err(format!("ERR Unknown client type '{kind}'"))
            }
        }
        4.. if arguments.is(2, "ID") => {
            let ids: Option<HashSet<_>> =
                (3..count).map(|at| parse_integer(arguments.get(at))).collect();
            let ids = ids.ok_or_else(|| "ERR Invalid client ID".to_owned())?;
            Ok(lines(&|id| ids.contains(&(id as i64))))
        }
        _ => Err(error::SYNTAX.to_owned()),
    }
}

/// CONFIG GET: the few settings that clients ask for. None can be set.
pub(crate) fn config(arguments: &impl Arguments, gateway: &Gateway, reply: &mut ReplyWriter<'_>) {
    if let Err(error) = subcommand(arguments, "config", &[("get", -3)]) {
        return reply.error(error);
    }
    let settings = [
        ("appendonly", "no".to_owned()),
        ("databases", "1".to_owned()),
        ("io-threads", gateway.threads.to_string()),
        ("maxclients", gateway.clients_max.to_string()),
        ("maxmemory", gateway.limits.region_bytes.to_string()),
        ("maxmemory-policy", info::eviction_policy(gateway).to_owned()),
        ("proto-max-bulk-len", (512_u64 << 20).to_string()),
        ("save", String::new()),
        ("timeout", gateway.idle_s_max.to_string()),
    ];
    let asked = |name: &str| {
        (2..arguments.count())
            .map(|at| arguments.get(at))
            .find(|asked| matches(&asked.to_ascii_lowercase(), name.as_bytes()))
    };
    let wanted: Vec<_> =
        settings.iter().filter_map(|(name, value)| Some((name, asked(name)?, value))).collect();
    reply.map(wanted.len());
    for (name, asked, value) in wanted {
        // Without a pattern the name comes back in the letters of the request.
        let is_name = asked.eq_ignore_ascii_case(name.as_bytes());
        reply.bulk(if is_name { asked } else { name.as_bytes() });
        reply.bulk(value);
    }
}

/// COMMAND.
pub(crate) fn command(arguments: &impl Arguments, reply: &mut ReplyWriter<'_>) {
    if arguments.count() == 1 {
        reply.array(COMMANDS.len());
        return COMMANDS.iter().for_each(|spec| describe(spec, reply));
    }
    let known = [("count", 2), ("info", -2), ("docs", -2), ("list", -2)];
    let named = || (2..arguments.count()).map(|at| find(arguments.get(at)));
    match subcommand(arguments, "command", &known) {
        Ok("count") => reply.integer(COMMANDS.len() as i64),
        Ok("list") if arguments.count() > 2 => reply.error(error::SYNTAX),
        Ok("list") => {
            reply.array(COMMANDS.len());
            COMMANDS.iter().for_each(|spec| reply.bulk(spec.name));
        }
        Ok("info") if arguments.count() == 2 => {
            reply.array(COMMANDS.len());
            COMMANDS.iter().for_each(|spec| describe(spec, reply));
        }
        Ok("info") => {
            reply.array(arguments.count() - 2);
            for spec in named() {
                match spec {
                    Some(spec) => describe(spec, reply),
                    None => reply.null(),
                }
            }
        }
        Ok(_) if arguments.count() == 2 => {
            reply.map(COMMANDS.len());
            COMMANDS.iter().for_each(|spec| document(spec, reply));
        }
        Ok(_) => {
            reply.map(named().flatten().count());
            named().flatten().for_each(|spec| document(spec, reply));
        }
        Err(error) => reply.error(error),
    }
}

/// The entry of COMMAND INFO.
fn describe(spec: &CommandSpec, reply: &mut ReplyWriter<'_>) {
    let words = |text: &'static str| text.split_whitespace();
    reply.array(10);
    reply.bulk(spec.name);
    reply.integer(spec.arity.into());
    reply.set(words(spec.flags).count());
    words(spec.flags).for_each(|flag| reply.simple(flag));
    let (first, last, step) = spec.keys;
    [first, last, step].into_iter().for_each(|number| reply.integer(number.into()));
    reply.set(words(spec.categories).count());
    words(spec.categories).for_each(|category| reply.simple(category));
    // Tips, specifications of keys, and subcommands.
    reply.set(0);
    reply.set(0);
    reply.set(0);
}

/// The entry of COMMAND DOCS.
fn document(spec: &CommandSpec, reply: &mut ReplyWriter<'_>) {
    reply.bulk(spec.name);
    reply.map(3);
    for (key, text) in [("summary", spec.summary), ("since", spec.since), ("group", spec.group)] {
        reply.bulk(key);
        reply.bulk(text);
    }
}

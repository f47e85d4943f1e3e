//! INFO, CLIENT, CONFIG and COMMAND.

use std::collections::HashSet;
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use farside_resp::{ReplyWriter, matches, parse_integer};
use rustix::param::clock_ticks_per_second;

use super::table::{COMMANDS, CommandSpec, find};
use super::{Arguments, ClientState, error, set_name};
use crate::gateway::{ClientRecord, Gateway};

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
        Ok("info") => reply.verbatim(&client_line(&state.record)),
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
        wanted.map(|record| client_line(record)).collect()
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
        ("maxmemory-policy", eviction_policy(gateway).to_owned()),
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

/// The version of redis whose answers the gateway gives. Clients derive from it what they may use.
pub(crate) const REDIS_VERSION: &str = "7.0.15";

/// The sections, in their order.
const SECTIONS: [&str; 8] =
    ["server", "clients", "memory", "stats", "replication", "cpu", "cluster", "keyspace"];

/// INFO, for all sections or those that are named.
pub(crate) fn info(arguments: &impl Arguments, gateway: &Gateway, reply: &mut ReplyWriter<'_>) {
    let is_wanted = |section: &str| {
        arguments.count() == 1
            || (1..arguments.count()).any(|at| {
                ["default", "all", "everything", section].iter().any(|w| arguments.is(at, w))
            })
    };
    let mut text = String::new();
    for section in SECTIONS.into_iter().filter(|section| is_wanted(section)) {
        if !text.is_empty() {
            text.push_str("\r\n");
        }
        let mut name = section.to_owned();
        name[..1].make_ascii_uppercase();
        // A string has room for everything; so below.
        let _ = write!(text, "# {name}\r\n");
        for (key, value) in entries(section, gateway) {
            let _ = write!(text, "{key}:{value}\r\n");
        }
    }
    reply.verbatim(&text);
}

fn entries(section: &str, gateway: &Gateway) -> Vec<(&'static str, String)> {
    let uptime = gateway.started.elapsed().as_secs();
    let (counts, figures) = (&gateway.counts, gateway.figures());
    match section {
        "server" => vec![
            ("redis_version", REDIS_VERSION.into()),
            ("redis_mode", "standalone".into()),
            ("farside_version", env!("CARGO_PKG_VERSION").into()),
            ("farside_server", gateway.server.clone()),
            ("os", "Linux".into()),
            ("arch_bits", usize::BITS.to_string()),
            ("process_id", std::process::id().to_string()),
            ("uptime_in_seconds", uptime.to_string()),
            ("uptime_in_days", (uptime / 86400).to_string()),
            ("io_threads_active", u8::from(gateway.threads > 1).to_string()),
        ],
        "clients" => vec![
            ("connected_clients", gateway.records().len().to_string()),
            ("maxclients", gateway.clients_max.to_string()),
            ("blocked_clients", "0".into()),
        ],
        "memory" => vec![
            ("used_memory", figures.used_bytes.to_string()),
            ("maxmemory", gateway.limits.region_bytes.to_string()),
            ("maxmemory_policy", eviction_policy(gateway).into()),
        ],
        "stats" => vec![
            ("total_connections_received", counts.connections.load(Relaxed).to_string()),
            ("total_commands_processed", counts.commands.load(Relaxed).to_string()),
            ("rejected_connections", counts.refused.load(Relaxed).to_string()),
            ("expired_keys", figures.keys_expired.to_string()),
            ("evicted_keys", figures.keys_evicted.to_string()),
        ],
        "cpu" => {
            let [user, system] = processor_seconds();
            vec![("used_cpu_sys", format!("{system:.6}")), ("used_cpu_user", format!("{user:.6}"))]
        }
        // As in redis there is no line without keys. How many of them expire is not known.
        "keyspace" if figures.keys == 0 => vec![],
        "keyspace" => vec![("db0", format!("keys={},expires=0,avg_ttl=0", figures.keys))],
        "replication" => vec![("role", "master".into()), ("connected_slaves", "0".into())],
        _ => vec![("cluster_enabled", "0".into())],
    }
}

/// What redis calls the store's way to make room.
fn eviction_policy(gateway: &Gateway) -> &'static str {
    if gateway.figures().is_cache { "allkeys-lru" } else { "noeviction" }
}

/// The time of the gateway's threads on processors, in user mode and in the kernel.
fn processor_seconds() -> [f64; 2] {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program is in parentheses, and may have any bytes.
    let behind_name = text.rsplit(')').next().unwrap_or_default();
    let mut fields = behind_name.split_whitespace().skip(11).map(|field| field.parse());
    let ticks = clock_ticks_per_second() as f64;
    [(); 2].map(|()| fields.next().and_then(|field| field.ok()).unwrap_or(0.0) / ticks)
}

/// The line of CLIENT LIST for a connection.
fn client_line(record: &ClientRecord) -> String {
    let age_ms = record.age_ms();
    let idle_ms = age_ms.saturating_sub(record.active_ms.load(Relaxed));
    let command = COMMANDS.get(usize::from(record.command.load(Relaxed)));
    format!(
        "id={} addr={} laddr={} fd={} name={} age={} idle={} flags=N db=0 sub=0 psub=0 ssub=0 \
         multi=-1 events=r cmd={} user=default redir=-1 resp={}\n",
        record.id,
        record.address,
        record.local_address,
        record.descriptor,
        record.name(),
        age_ms / 1000,
        idle_ms / 1000,
        command.map_or("NULL", |spec| spec.name),
        record.protocol.load(Relaxed),
    )
}

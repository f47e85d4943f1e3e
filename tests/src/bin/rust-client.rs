//! A client for the test of clients in several languages, `client/python/tests/test_clients.py`:
//! `rust-client SERVER` runs an operation for each line of stdin. A line is the operation, a key
//! and arguments, with tabs between them; keys and values are hexadecimal. Prints the result.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "only a test uses this")]

use std::io::Write;
use std::time::Duration;

use farside::{Client, Session, Store, Ttl, Version};

fn bytes(hex: &str) -> Vec<u8> {
    let pairs = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    pairs.map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect()
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn optional<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or("absent".to_owned(), text)
}

fn run(session: &mut Session, line: &str) -> farside::Result<String> {
    let words: Vec<&str> = line.split('\t').collect();
    let (operation, key) = (words[0], bytes(words[1]));
    let value = || bytes(words[2]);
    let number = |at: usize| words[at].parse::<u64>().unwrap();
    let ttl = |at: usize| Duration::from_millis(number(at));
    let keys = || words[1..].iter().map(|key| bytes(key));
    let applied = |applied: bool| u8::from(applied).to_string();
    let done = String::new();
    Ok(match operation {
        "get" => optional(session.get(key)?, |value| hex(&*value)),
        "exists" => applied(session.exists(key)?),
        "version" => optional(session.version(key)?, |version| version.to_u64().to_string()),
        "ttl" => optional(session.ttl(key)?, |ttl| match ttl {
            Ttl::For(time) => time.as_millis().to_string(),
            _ => "forever".to_owned(),
        }),
        "get_many" => {
            let values = session.get_many(keys())?;
            let texts = values.into_iter().map(|value| optional(value, |value| hex(&*value)));
            texts.collect::<Vec<_>>().join("\t")
        }
        "scan" => {
            let found = session.scan_prefix(key)?.map(|entry| Ok(hex(entry?.key)));
            found.collect::<farside::Result<Vec<_>>>()?.join("\t")
        }
        "put" => session.put(key, value()).map(|()| done)?,
        "put_ttl" => session.put_with_ttl(key, value(), ttl(3)).map(|()| done)?,
        "insert" => applied(session.insert(key, value())?),
        "update" => applied(session.update(key, value())?),
        "put_if_version" => {
            let store = Store::if_version(Version::from_u64(number(3)));
            applied(session.store(key, value(), store)?.applied)
        }
        "put_if_value" => {
            let expected = bytes(words[3]);
            applied(session.store(key, value(), Store::if_value(&expected))?.applied)
        }
        "increment" => session.increment(key, words[2].parse().unwrap())?.to_string(),
        "append" => session.append(key, value())?.to_string(),
        "touch" => applied(session.touch(key, ttl(2))?),
        "persist" => applied(session.persist(key)?),
        "delete" => applied(session.delete(key)?),
        "delete_if_version" => {
            applied(session.delete_if_version(key, Version::from_u64(number(2)))?)
        }
        "put_many" => {
            let words: Vec<_> = keys().collect();
            session.put_many(words.chunks(2).map(|pair| (&pair[0], &pair[1]))).map(|()| done)?
        }
        "delete_many" => session.delete_many(keys())?.to_string(),
        _ => panic!("no operation {operation}"),
    })
}

fn main() {
    let server = std::env::args().nth(1).unwrap();
    let client = Client::builder().server(&server).connect().unwrap();
    let mut session = client.session().unwrap();
    for line in std::io::stdin().lines() {
        println!("{}", run(&mut session, &line.unwrap()).unwrap());
        std::io::stdout().flush().unwrap();
    }
}

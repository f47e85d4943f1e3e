//! Programs and libraries for redis work with kv-resp: redis-cli, redis-benchmark, the Rust crate,
//! redis-py and ioredis.

use std::path::PathBuf;
use std::process::Command;

use farside_tests::command::CommandOutput;
use farside_tests::{ServerProcess, binary, left_out};

use super::gateway::RespServer;

const REDIS_PY: &str = include_str!("redis_py.py");
const IOREDIS: &str = include_str!("ioredis.js");

#[on(any, rdma_in_soak)]
fn programs_of_redis_work() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--threads", "2"]);
    let program = |name: &str, arguments: &[&str]| {
        let output = Command::new(name).args(["-p", gateway.port()]).args(arguments).output();
        output.ok().map(|output| CommandOutput::new(output).succeeded())
    };
    let Some(set) = program("redis-cli", &["set", "greeting", "hello"]) else {
        return left_out("without redis", "it runs redis-cli and redis-benchmark");
    };
    assert_eq!(set.text(), "OK\n");
    let get = program("redis-cli", &["-3", "get", "greeting"]).unwrap();
    assert_eq!(get.text(), "hello\n");
    for depth in ["1", "16"] {
        let arguments =
            ["-t", "get,set,incr,mset,ping", "-n", "5000", "-c", "10", "-q", "-P", depth];
        let output = program("redis-benchmark", &arguments).unwrap();
        assert!(output.text().contains("GET: ") && !output.text().contains("rror"));
    }
}

#[on(any, rdma_in_soak)]
fn the_crate_redis_works() {
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway::<&str>(&server, &[]);
    for protocol in ["resp2", "resp3"] {
        let url = format!("redis://{}/?protocol={protocol}", gateway.address);
        let mut redis = redis::Client::open(url).unwrap().get_connection().unwrap();
        let () = redis::cmd("FLUSHDB").query(&mut redis).unwrap();
        let one: i64 = redis::cmd("INCR").arg("n").query(&mut redis).unwrap();
        assert_eq!(one, 1);
        let set: bool = redis::cmd("SETNX").arg("n").arg("2").query(&mut redis).unwrap();
        assert!(!set);
        let values: (Option<String>, Option<String>) = redis::pipe()
            .cmd("SET")
            .arg("a")
            .arg("1")
            .ignore()
            .cmd("GET")
            .arg("a")
            .cmd("GET")
            .arg("none")
            .query(&mut redis)
            .unwrap();
        assert_eq!(values, (Some("1".into()), None));
        let bytes: Vec<u8> = (0..=255).collect();
        let () = redis::cmd("SET").arg(&bytes).arg(&bytes).query(&mut redis).unwrap();
        let found: Vec<Option<Vec<u8>>> =
            redis::cmd("MGET").arg(&bytes).arg("none").query(&mut redis).unwrap();
        assert_eq!(found, [Some(bytes), None]);
        let wrong: redis::RedisResult<i64> =
            redis::cmd("INCRBY").arg("n").arg("x").query(&mut redis);
        assert!(wrong.unwrap_err().to_string().contains("not an integer"));
        let mut keys: Vec<String> = redis::cmd("KEYS").arg("?").query(&mut redis).unwrap();
        keys.sort();
        assert_eq!(keys, ["a", "n"]);
    }
}

/// Runs a program with a library for redis: an interpreter, its flag for a text, and the text.
/// Leaves the test out if `probe` fails.
fn run_library(interpreter: &PathBuf, flag: &str, probe: &str, program: &str, name: &str) {
    let has_library = Command::new(interpreter).args([flag, probe]).output();
    if !has_library.is_ok_and(|output| output.status.success()) {
        return left_out(&format!("without {name}"), "it runs a program that uses it");
    }
    let server = ServerProcess::start("--memory 64MiB");
    let gateway = RespServer::gateway(&server, &["--threads", "2"]);
    let mut command = Command::new(interpreter);
    let output = command.args([flag, program, gateway.port()]).output().unwrap();
    let output = CommandOutput::new(output).succeeded();
    assert!(output.text().starts_with(name), "{}", output.text());
    println!("{}", output.text());
}

#[on(any, rdma_in_soak)]
fn redis_py_works() {
    // client/python/needs.sh makes this environment for the tests of the Python client.
    let gateway = binary("kv-resp");
    let target = gateway.parent().and_then(|profile| profile.parent()).unwrap();
    let own = target.join("python-venv/bin/python");
    let python = if own.exists() { own } else { "python3".into() };
    run_library(&python, "-c", "import redis.asyncio", REDIS_PY, "redis-py");
}

#[on(any, rdma_in_soak)]
fn ioredis_works() {
    // NODE_PATH names the folder that has it.
    run_library(&"node".into(), "-e", "require(\"ioredis\")", IOREDIS, "ioredis");
}

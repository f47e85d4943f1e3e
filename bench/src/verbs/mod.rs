//! `kv-bench verbs`: what a fabric can do at most, without keys, index or checks.
//!
//! The verbs go to blocks that the server hands out to this client as free ones, behind their
//! headers, so that nothing of the store is touched; they are given back afterwards.

mod attach;
mod measure;

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::time::Duration;

use farside_common::attach::AnyFabric;
use farside_common::fabric::Fabric;
use farside_common::layout::{BLOCK_HEADER_BYTES, CHUNK_BYTES, SizeClass};
use farside_common::size::ByteSize;
use serde::Serialize;

use crate::args::Verbs;
use crate::environment::Environment;
use crate::interrupt::Interrupt;
use crate::report::grouped;
use crate::server::Server;
use crate::sizing::{Memory, VALUE_BYTES_MAX_DEFAULT};
use crate::{Error, Result};

pub use attach::Attached;
pub use measure::{Plan, Rate, RawVerb, measure};

/// The result of `kv-bench verbs`.
#[derive(Clone, Debug, Serialize)]
#[allow(missing_docs, reason = "the names are those of the JSON")]
pub struct VerbsReport {
    pub fabric: String,
    pub bytes: u32,
    pub depth: u16,
    pub read: Rate,
    pub write: Rate,
    pub cas: Rate,
    pub update: Rate,
    #[serde(skip)]
    pub environment: String,
    #[serde(skip)]
    pub blocks: usize,
}

/// Measures READ, WRITE, compare-and-swap and a PUT's chain, one after the other.
///
/// # Errors
/// What the server or the fabric refuses.
pub fn run(args: &Verbs, interrupt: &Interrupt) -> Result<VerbsReport> {
    let block_bytes = BLOCK_HEADER_BYTES + u64::from(args.bytes);
    let class = SizeClass::for_bytes(block_bytes)
        .ok_or_else(|| Error::Usage(format!("no block holds {block_bytes} bytes")))?;
    let ByteSize(span) = args.span;
    let blocks = (span / class.block_bytes()).max(args.depth.into()) as usize;
    let config = args.target.config()?;
    let server = Server::connect_or_start(config, || Ok(memory(class, blocks)), interrupt)?;
    let mut attached = Attached::connect(&server.config)?;
    let targets = attached.take_blocks(class, blocks)?;
    let attached = RefCell::new(attached);
    let plan = Plan {
        targets: &targets,
        bytes: args.bytes,
        lanes: args.depth,
        duration: Duration::from_secs_f64(args.seconds),
        look: &|| {
            attached.borrow_mut().answer_all()?;
            interrupt.check()
        },
    };
    let fabric = attached.borrow().fabric(args.depth)?;
    let [read, write, cas, update] = match fabric {
        AnyFabric::Shm(mut fabric) => rates(&mut fabric, &plan)?,
        AnyFabric::Verbs(mut fabric) => rates(&mut fabric, &plan)?,
    };
    attached.into_inner().give_back()?;
    Ok(VerbsReport {
        fabric: server.fabric().to_owned(),
        bytes: args.bytes,
        depth: args.depth,
        read,
        write,
        cas,
        update,
        environment: Environment::look().to_string(),
        blocks: targets.len(),
    })
}

/// READ, WRITE, compare-and-swap and a PUT's chain, one after the other.
fn rates<F: Fabric>(fabric: &mut F, plan: &Plan<'_>) -> Result<[Rate; 4]> {
    // The first round finds pages and branches cold.
    measure(fabric, RawVerb::Read, &Plan { duration: plan.duration / 10, ..*plan })?;
    Ok([
        measure(fabric, RawVerb::Read, plan)?,
        measure(fabric, RawVerb::Write, plan)?,
        measure(fabric, RawVerb::CompareSwap, plan)?,
        measure(fabric, RawVerb::Update, plan)?,
    ])
}

fn memory(class: SizeClass, blocks: usize) -> Memory {
    let spans = (blocks as u64).div_ceil(class.blocks_per_span());
    let heap_bytes = spans * class.chunks_per_span() * CHUNK_BYTES;
    let region_bytes = heap_bytes + 32 * CHUNK_BYTES;
    Memory { region_bytes, index_bytes: CHUNK_BYTES, value_bytes_max: VALUE_BYTES_MAX_DEFAULT }
}

impl VerbsReport {
    /// The table for people.
    ///
    /// # Errors
    /// None: formatting into a text does not fail.
    pub fn table(&self) -> std::result::Result<String, fmt::Error> {
        let mut out = String::new();
        let Self { fabric, bytes, depth, blocks, .. } = self;
        let blocks = grouped(*blocks as u64);
        writeln!(out, "verbs on {fabric}: {bytes} B, depth {depth}, over {blocks} blocks")?;
        writeln!(out, "{}\n", self.environment)?;
        writeln!(out, "{:<7}{:>14}{:>9}{:>9}", "", "rate /s", "p50 ns", "p99 ns")?;
        let rates = [self.read, self.write, self.cas, self.update];
        for (name, rate) in ["READ", "WRITE", "CAS", "PUT's"].into_iter().zip(rates) {
            let Rate { rate_per_s, p50_ns, p99_ns } = rate;
            let rate = grouped(rate_per_s as u64);
            writeln!(out, "{name:<7}{rate:>14}{:>9}{:>9}", grouped(p50_ns), grouped(p99_ns))?;
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_json_has_every_field() {
        let rate = Rate { rate_per_s: 1e6, p50_ns: 100, p99_ns: 200 };
        let report = VerbsReport {
            fabric: "shm".into(),
            bytes: 128,
            depth: 4,
            read: rate,
            write: rate,
            cas: rate,
            update: rate,
            environment: "here".into(),
            blocks: 7,
        };
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json.as_object().unwrap().len(), 7);
        for verb in ["read", "write", "cas"] {
            assert_eq!(json[verb]["rate_per_s"], 1e6);
            assert_eq!(
                (json[verb]["p50_ns"].as_u64(), json[verb]["p99_ns"].as_u64()),
                (Some(100), Some(200))
            );
        }
        assert_eq!((json["bytes"].as_u64(), json["depth"].as_u64()), (Some(128), Some(4)));
        assert!(report.table().unwrap().contains("1,000,000"));
    }
}

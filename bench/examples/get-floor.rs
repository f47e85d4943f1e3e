//! The floor of a GET: a loop with nothing but the steps that every GET over shared memory needs.
//! It hashes the key, looks up where its block is, copies the block's 128 bytes into a buffer, sums
//! the copy, compares sum and key, and copies the 64 bytes of the value out.
//! Nothing changes a block meanwhile. Keys, hash, checksum and lengths are those of Farside.
//!
//! `get-floor RECORDS DEPTH OPERATIONS` prints the throughput. A DEPTH of 16 interleaves 16 keys
//! and prefetches. `tools/scripts/instructions.sh` counts the functions.

use std::hint::black_box;

use farside_bench::accounting::thread_cpu_s;
use farside_bench::distribution::{Distribution, Shape, Skew};
use farside_bench::operations::{BATCH, Batch, Generator, Operation};
use farside_bench::pattern::Pattern;
use farside_bench::records::{self, KEY_BYTES, Key, RecordCounter, ValueSize};
use farside_bench::workload::Workload;
use farside_fabric::memory::prefetch;
use farside_layout::checksum;
use farside_layout::hash::{KeyHash, KeyHasher};

const LANES: usize = 16;
// A block has 32 bytes of header, then the key and the value. Bytes 0 to 3 hold the checksum of all
// bytes from 12 on.
const COVERED_AT: usize = 12;
const KEY_AT: usize = 32;
const VALUE_AT: usize = KEY_AT + KEY_BYTES;
const VALUE_BYTES: usize = 64;
const END: usize = VALUE_AT + VALUE_BYTES;
type Value = [u8; VALUE_BYTES];

/// A block of Farside's class for these keys and values.
#[derive(Clone)]
#[repr(align(128))]
struct Block([u8; 128]);

/// The records of the run, all stored before it.
struct Records {
    hasher: KeyHasher,
    /// A hash table, at most half full: half of a key's hash, and its block's index.
    entries: Vec<(u64, usize)>,
    /// The first one belongs to no key.
    blocks: Vec<Block>,
}

impl Records {
    fn new(records: usize) -> Self {
        let entries = vec![(0, 0); (2 * records).next_power_of_two()];
        let (hasher, blocks) = (KeyHasher::new(&[7; 16]), vec![Block([0; 128]); records + 1]);
        let mut this = Self { hasher, entries, blocks };
        for (index, Block(block)) in this.blocks.iter_mut().enumerate().skip(1) {
            let key = records::key_of(index as u64 - 1);
            block[KEY_AT..VALUE_AT].copy_from_slice(&key);
            block[VALUE_AT..END].fill(index as u8);
            let sum = checksum(&block[COVERED_AT..END], 0).to_le_bytes();
            block[..4].copy_from_slice(&sum);
            let identity = hasher.hash(&key).identity();
            let mut at = identity as usize % this.entries.len();
            while this.entries[at].1 != 0 {
                at = (at + 1) % this.entries.len();
            }
            this.entries[at] = (identity, index);
        }
        this
    }

    /// The key's entry if no other key has its place, and those after it.
    #[inline(always)]
    fn entries(&self, hash: KeyHash) -> impl Iterator<Item = &(u64, usize)> {
        let at = hash.identity() as usize & (self.entries.len() - 1);
        self.entries[at..].iter().chain(&self.entries)
    }

    #[inline(always)]
    fn block(&self, hash: KeyHash) -> &Block {
        let mut entries = self.entries(hash);
        let end = entries.find(|(identity, index)| *identity == hash.identity() || *index == 0);
        &self.blocks[end.map_or(0, |(_, index)| *index)]
    }
}

/// Copies the block, checks the copy, and copies its value. Returns whether it is the key's.
#[inline(always)]
fn read(Block(block): &Block, key: &Key, buffer: &mut Block, value: &mut Value) -> bool {
    buffer.0 = *block;
    let Block(copy) = &*black_box(buffer); // not the original
    let sum = checksum(&copy[COVERED_AT..END], 0).to_le_bytes();
    value.copy_from_slice(&copy[VALUE_AT..END]);
    copy[..4] == sum && copy[KEY_AT..VALUE_AT] == *key
}

#[inline(never)]
fn get_one(records: &Records, key: &Key, buffer: &mut Block, value: &mut Value) -> bool {
    read(records.block(records.hasher.hash(key)), key, buffer, value)
}

#[inline(never)]
fn get_interleaved(
    records: &Records,
    operations: &[Operation; LANES],
    buffers: &mut [Block; LANES],
    values: &mut [Value; LANES],
) -> bool {
    let hashes = operations.each_ref().map(|operation| {
        let hash = records.hasher.hash(&operation.key);
        records.entries(hash).take(1).for_each(prefetch);
        hash
    });
    let blocks = hashes.map(|hash| {
        let block = records.block(hash);
        block.0.as_chunks::<64>().0.iter().for_each(prefetch);
        block
    });
    let lanes = operations.iter().zip(blocks).zip(buffers.iter_mut().zip(values));
    lanes.fold(true, |are_found, ((operation, block), (buffer, value))| {
        are_found & read(block, &operation.key, buffer, value)
    })
}

#[allow(clippy::print_stdout, reason = "the result")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments = std::env::args().skip(1).map(|it| it.parse()).collect::<Result<Vec<u64>, _>>();
    let [count, depth @ (1 | 16), operations] = arguments?[..] else {
        return Err("usage: get-floor RECORDS 1|16 OPERATIONS".into());
    };
    let records = Records::new(count as usize);
    let distribution = Distribution::new(Shape::Zipfian, &Skew::default(), count).into();
    let pattern = Pattern { mix: Workload::C.mix(), distribution, sizes: ValueSize::Constant(64) };
    let mut gets = Generator::new(pattern, RecordCounter::new(count).into(), 1);
    let mut buffers = [const { Block([0; 128]) }; LANES];
    let mut values = [[0; VALUE_BYTES]; LANES];
    let (mut batch, mut are_found, start) = (Batch::new(), true, thread_cpu_s());
    for _ in 0..operations / BATCH as u64 {
        batch.refill(&mut gets);
        for lanes in batch.rest().as_chunks().0 {
            are_found &= match depth {
                1 => lanes.iter().all(|operation| {
                    get_one(&records, &operation.key, &mut buffers[0], &mut values[0])
                }),
                _ => get_interleaved(&records, lanes, &mut buffers, &mut values),
            };
        }
        black_box(&values);
        batch.consume(BATCH);
    }
    let rate = operations as f64 / (thread_cpu_s() - start) / 1e6;
    println!("{rate:.2} M operations a CPU second");
    if are_found { Ok(()) } else { Err("a record was not found".into()) }
}

//! Every operation beside every other, on one key.

use farside_tests::simulator::{Bounds, Op, Scenario, client};

const OPS: [Op; 6] =
    [Op::Get(0), Op::Put(0), Op::Insert(0), Op::Update(0), Op::Delete(0), Op::Exchange(0, "i0")];

#[test]
fn every_pair() {
    for first in OPS {
        for second in OPS {
            for (stored, known) in [(false, 0), (true, 0), (true, 1), (true, 2)] {
                let script = |op, known: bool| {
                    let script = if known { client().knows(0) } else { client() };
                    script.op(op).get(0)
                };
                let name = format!("{first:?} | {second:?} stored={stored} known={known}");
                let mut scenario = Scenario::new(name);
                if stored {
                    scenario = scenario.stored(0);
                }
                let scenario =
                    scenario.client(script(first, known > 0)).client(script(second, known > 1));
                let started = std::time::Instant::now();
                let bounds = Bounds { preemptions: Some(3), ..Bounds::default() };
                let explored =
                    scenario.explore(bounds).unwrap_or_else(|failure| panic!("{failure}"));
                println!("{:60} {explored:?} {:?}", scenario.name(), started.elapsed());
            }
        }
    }
}

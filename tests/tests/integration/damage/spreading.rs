//! What damaged words lead to later, when the blocks that changes freed are used again.

use super::*;

/// Every second key gets one flipped bit in what its word says about the block, and is then stored
/// again by a session that has to trust the word. The mark of four bytes goes where the word
/// points, which may be the middle of another key's block; but nobody's block is freed by it, so no
/// more is lost when what was freed is used again, and no key is found with a value that is not its
/// own.
#[test]
fn blocks_that_damage_frees_never_carry_a_value_to_another_key() {
    let scene = Scene::new(&["--memory", "16MiB", "--index", "64KiB", "--grace-ms", "40"]);
    let mut session = scene.cold();
    let key = |n: u64| format!("key-{n}").into_bytes();
    let bytes = |n: u64| [10, 50, 200, 700][n as usize / 2 % 4];
    let keys = 8 * u64::from(TARGET_BITS);
    (0..keys).for_each(|n| session.put(&key(n), &value(n, 0, bytes(n))).unwrap());
    for n in (0..keys).step_by(2) {
        scene.flip(Bit { offset: scene.slot_of(&key(n)), bit: n as u32 / 8 });
        let what = format!("key {n}, PUT");
        let _ = timed(&what, || session.put(&key(n), &value(n, 1, bytes(n))));
    }
    let others = |session: &mut Session| -> Vec<u64> {
        let lost = |n: &u64| !matches!(session.get(&key(*n)), Ok(Some(_)));
        (1..keys).step_by(2).filter(lost).collect()
    };
    let marked = others(&mut session);
    // Uses what was freed.
    for round in 2..12 {
        std::thread::sleep(Duration::from_millis(50));
        for n in 0..keys {
            let what = format!("round {round}, key {n}");
            let values: Vec<Vec<u8>> = (0..round).map(|count| value(n, count, bytes(n))).collect();
            let allowed: Vec<&[u8]> = values.iter().map(Vec::as_slice).collect();
            let _ = get(&mut session, &key(n), &allowed, &what);
            if n % 3 == 0 {
                let _ = timed(&what, || session.put(&key(n), &value(n, round, bytes(n))));
            }
        }
    }
    let lost = others(&mut session);
    assert!(lost.iter().all(|n| marked.contains(n)), "{lost:?}, right after the damage {marked:?}");
}

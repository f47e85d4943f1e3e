//! Writes the seeds of each target into a folder of its own, where libFuzzer starts:
//! `farside-fuzz FOLDER`.

use std::fs;
use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    let folder: PathBuf = std::env::args_os().nth(1).unwrap_or_default().into();
    for target in farside_fuzz::TARGETS {
        let folder = folder.join(target.name);
        fs::create_dir_all(&folder)?;
        for (n, seed) in (target.seeds)().into_iter().enumerate() {
            fs::write(folder.join(format!("seed-{n}")), seed)?;
        }
    }
    Ok(())
}

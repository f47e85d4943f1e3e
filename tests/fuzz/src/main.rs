//! Writes the seeds of all targets into a folder for each, for libFuzzer to start from:
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

//! Proves that a browser shows the page of `kv-bench report`, made from results of real runs.
//!
//! Screenshots by headless Chromium, in the light and the dark scheme, have content in every
//! quarter. Guards against a page that is well-formed and blank. Without a browser the test is left
//! out.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use farside_tests::left_out;

use crate::workloads::{bench, words};

/// Returns an installed browser that starts. Ubuntu's package is a stub that only names another
/// package, and does not start.
fn browser() -> Option<&'static str> {
    let starts = |name: &&str| {
        let version = Command::new(name).arg("--version").stderr(Stdio::null()).output();
        version.is_ok_and(|output| output.status.success())
    };
    ["chromium", "chromium-headless-shell", "chromium-browser", "google-chrome"]
        .into_iter()
        .find(starts)
}

/// The width and height of a screenshot, in pixels.
const SIZE: (usize, usize) = (1400, 1600);
/// Timeout of a screenshot, for a busy machine.
const SCREENSHOT_TIMEOUT: Duration = Duration::from_secs(300);

/// Returns a browser's screenshot of a page: rows of pixels of red, green and blue.
fn screenshot(browser: &str, page: &Path, is_dark: bool) -> Vec<Vec<[u8; 3]>> {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("page.png");
    let scheme = if is_dark { 0 } else { 1 };
    let mut child = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
        .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
        .arg(format!("--window-size={},{}", SIZE.0, SIZE.1))
        .arg(format!("--screenshot={}", image.display()))
        .arg(format!("file://{}", page.display()))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let deadline = Instant::now() + SCREENSHOT_TIMEOUT;
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let file = std::fs::File::open(image).expect("a screenshot, in time");
    let file = std::io::BufReader::new(file);
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    assert_eq!(info.bit_depth, png::BitDepth::Eight);
    let samples = info.color_type.samples();
    let rows = bytes[..info.buffer_size()].chunks(info.line_size);
    rows.map(|row| row.chunks_exact(samples).map(|p| [p[0], p[1], p[2]]).collect()).collect()
}

/// Checks that every quarter has more than the background, in several colours.
fn expect_quarters(rows: &[Vec<[u8; 3]>]) {
    let (height, width) = (rows.len(), rows[0].len());
    assert_eq!((width, height), SIZE);
    for (top, left) in [(0, 0), (0, width / 2), (height / 2, 0), (height / 2, width / 2)] {
        let quarter =
            rows[top..top + height / 2].iter().flat_map(|row| &row[left..left + width / 2]);
        let colours: BTreeSet<[u8; 3]> = quarter.clone().copied().collect();
        let background = rows[height - 1][0];
        let drawn = quarter.filter(|pixel| **pixel != background).count();
        assert!(colours.len() > 20, "{} colours at {top}, {left}", colours.len());
        assert!(drawn > 2000, "{drawn} pixels drawn at {top}, {left}");
    }
}

#[on(shm)]
fn a_browser_shows_the_page_in_both_schemes() {
    let Some(browser) = browser() else {
        left_out("without Chromium", "a browser has to show the report of kv-bench");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let results = folder.path().join("results");
    std::fs::create_dir(&results).unwrap();
    for (workload, depth) in [("a", 1), ("a", 8), ("c", 1), ("c", 8)] {
        let json = results.join(format!("{workload}{depth}.json"));
        let line = format!(
            "ycsb --workload {workload} --depth {depth} --records 1000 --warmup-seconds 0 \
             --seconds 0.2 --limit-seconds 0.1 --json {}",
            json.display()
        );
        bench(&words(&line)).succeeded();
    }
    let page = folder.path().join("page.html");
    let (from, to) = (results.to_str().unwrap(), page.to_str().unwrap());
    bench(&["report", from, "-o", to]).succeeded();
    let [light, dark] = [false, true].map(|is_dark| screenshot(browser, &page, is_dark));
    expect_quarters(&light);
    expect_quarters(&dark);
    let brightness = |rows: &[Vec<[u8; 3]>]| u32::from(rows[0][0][1]);
    assert!(brightness(&light) > 200 && brightness(&dark) < 60);
}

#[on(shm)]
fn a_file_that_is_no_result_is_reported_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (page, file) = (folder.path().join("page.html"), folder.path().join("cut.json"));
    std::fs::write(&file, "{\"workload\":").unwrap();
    let (from, to) = (file.to_str().unwrap(), page.to_str().unwrap());
    bench(&["report", from, "-o", to]).expect_line(5, &["cut.json", "EOF while parsing"]);
    assert!(!page.exists());
    bench(&["report", "-o", to]).expect_line(2, &["RESULTS"]);
}

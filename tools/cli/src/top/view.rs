//! How a view of `top` looks.

use std::time::Duration;

use farside::{ClassStatistics, ServerStatistics};
use farside_cli::formats::printable;
use farside_layout::CHUNK_BYTES;
use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::block::FULL;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Cell, Paragraph, Row, Sparkline, Table, Wrap};

use super::figures::{ClientFigures, Figures, RoundTrip, ShardFigures};
use crate::output::{block_name, bytes, duration};

/// The smallest view.
const WIDTH_MIN: u16 = 72;
const HEIGHT_MIN: u16 = 18;
/// The height of the panels of memory and rates, with their borders.
const PANELS_HEIGHT: u16 = 9;
/// What a table takes beside its rows: borders and titles.
const TABLE_FRAME: u16 = 3;
/// The number of block sizes that a view in the terminal shows: those with most memory.
const CLASSES_MAX: usize = 8;
/// The width of a bar in the table of block sizes.
const BAR_WIDTH: usize = 12;

const INDEX: Color = Color::Magenta;
const IN_USE: Color = Color::Cyan;
const FREE_BLOCKS: Color = Color::Blue;
const FREE: Color = Color::DarkGray;

/// Returns the height of a view that has room for everything.
pub(super) fn height_of(figures: &Figures, shard: usize) -> u16 {
    let Some(Ok(of_shard)) = figures.shards.get(shard) else { return HEIGHT_MIN };
    let rows = of_shard.statistics.classes.len().min(CLASSES_MAX) + of_shard.clients.len();
    let height = 1 + PANELS_HEIGHT + 2 * TABLE_FRAME + u16::try_from(rows).unwrap_or(u16::MAX / 2);
    height.max(HEIGHT_MIN)
}

/// Draws the view of a shard.
pub(super) fn draw(frame: &mut Frame<'_>, figures: &Figures, shard: usize) {
    let area = frame.area();
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        let [width, height] = [area.width, area.height];
        let message = format!(
            "The terminal has {width} x {height} characters. This view needs {WIDTH_MIN} x \
             {HEIGHT_MIN}: enlarge it, or press q."
        );
        return frame.render_widget(Paragraph::new(message).wrap(Wrap { trim: true }), area);
    }
    let [title, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let of_shard = figures.shards.get(shard);
    draw_title(frame, title, figures, shard);
    match of_shard {
        None => frame.render_widget("  asking the server ...".dim(), rest),
        Some(Err(error)) => {
            let error = Paragraph::new(printable(error)).red().wrap(Wrap { trim: true });
            frame.render_widget(error.block(panel("not available")), rest);
        }
        Some(Ok(of_shard)) => draw_shard(frame, rest, of_shard, figures.round_trip),
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, figures: &Figures, shard: usize) {
    let mut left = vec![" farside ".black().on_cyan().bold(), " ".into()];
    left.push(printable(&figures.server).bold());
    if figures.shards.len() > 1 {
        let last = figures.shards.len() - 1;
        left.push(format!("  shard {shard} of 0-{last}, arrows choose").yellow());
    }
    let mut right = String::new();
    if let Some(Ok(ShardFigures { statistics, .. })) = figures.shards.get(shard) {
        let clients = statistics.clients.saturating_sub(1);
        let (up, start) = (duration(statistics.uptime_ms), statistics.incarnation);
        right =
            format!("up {up}, start {start}, clients {clients}, lost {}", statistics.clients_lost);
    }
    frame.render_widget(Line::from(left), area);
    let right = Line::from(vec![right.into(), "  q".bold(), " quits ".into()]);
    let width = (right.width() as u16).min(area.width);
    let [_, area] = Layout::horizontal([Constraint::Min(0), Constraint::Length(width)]).areas(area);
    frame.render_widget(right, area);
}

fn panel(title: &str) -> Block<'_> {
    let title = Line::from(format!(" {title} ")).bold();
    let borders = Style::new().fg(Color::DarkGray);
    Block::bordered().border_type(BorderType::Rounded).border_style(borders).title(title)
}

fn draw_shard(
    frame: &mut Frame<'_>,
    area: Rect,
    of_shard: &ShardFigures,
    round_trip: Option<RoundTrip>,
) {
    let mut classes: Vec<&ClassStatistics> = of_shard.statistics.classes.iter().collect();
    classes.sort_by_key(|class| std::cmp::Reverse(class.blocks * class.class.block_bytes()));
    classes.truncate(CLASSES_MAX);
    let classes_height = TABLE_FRAME + classes.len() as u16;
    // A low terminal shows few block sizes, but always some clients.
    let [panels, class_area, clients] = Layout::vertical([
        Constraint::Length(PANELS_HEIGHT),
        Constraint::Max(classes_height),
        Constraint::Min(TABLE_FRAME + 1),
    ])
    .areas(area);
    let [memory, rates] = Layout::horizontal([Constraint::Fill(1); 2]).areas(panels);
    draw_memory(frame, memory, &of_shard.statistics);
    draw_rates(frame, rates, of_shard, round_trip);
    draw_classes(frame, class_area, &classes);
    draw_clients(frame, clients, &of_shard.clients);
}

/// How the bytes of the heap are used.
struct MemoryUse {
    heap: u64,
    index: u64,
    in_use: u64,
    free_blocks: u64,
    free: u64,
}

impl MemoryUse {
    fn of(statistics: &ServerStatistics) -> Self {
        let in_use = |class: &ClassStatistics| {
            class.blocks.saturating_sub(class.blocks_free) * class.class.block_bytes()
        };
        let heap = statistics.chunks * CHUNK_BYTES;
        let index = statistics.chunks_index * CHUNK_BYTES;
        let free = statistics.chunks_free * CHUNK_BYTES;
        let in_use: u64 = statistics.classes.iter().map(in_use).sum();
        // With the remainders of chunks, in which no block fits.
        let free_blocks = heap.saturating_sub(index + free + in_use);
        Self { heap, index, in_use, free_blocks, free }
    }
}

fn draw_memory(frame: &mut Frame<'_>, area: Rect, statistics: &ServerStatistics) {
    let memory = MemoryUse::of(statistics);
    let parts = [
        ("index", memory.index, INDEX),
        ("in use", memory.in_use, IN_USE),
        ("free blocks", memory.free_blocks, FREE_BLOCKS),
        ("free chunks", memory.free, FREE),
    ];
    let width = usize::from(area.width.saturating_sub(4));
    let share = |part: u64| part as f64 / memory.heap.max(1) as f64;
    let mut bar = Vec::new();
    let (mut sum, mut drawn) = (0, 0);
    for (_, part, color) in parts {
        sum += part;
        let end = ((share(sum) * width as f64).round() as usize).min(width);
        bar.push(Span::from(FULL.repeat(end.saturating_sub(drawn))).fg(color));
        drawn = end.max(drawn);
    }
    let huge = bytes(statistics.huge_page_bytes);
    let mut lines = vec![
        Line::from(format!(" {} of heap, {huge} in 2 MiB pages", bytes(memory.heap))),
        Line::from_iter(std::iter::once(Span::from(" ")).chain(bar)),
    ];
    lines.extend(parts.map(|(name, part, color)| {
        let percent = share(part) * 100.0;
        let mark = Span::from(format!(" {FULL}{FULL} ")).fg(color);
        Line::from(vec![mark, format!("{name:<12}{:>10}  {percent:>5.1} %", bytes(part)).into()])
    }));
    frame.render_widget(Paragraph::new(lines).block(panel("memory")), area);
}

fn draw_rates(
    frame: &mut Frame<'_>,
    area: Rect,
    of_shard: &ShardFigures,
    round_trip: Option<RoundTrip>,
) {
    let block = panel("per second");
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let rates = of_shard.rates;
    let of = |rate: fn(&super::figures::Rates) -> f64| {
        rates.as_ref().map_or_else(|| "-".into(), |rates| number(rate(rates)))
    };
    let pair = |one: (&str, String), other: (&str, String)| {
        let cell = |(name, figure): (&str, String)| {
            [Span::from(format!(" {name:<11}")).dim(), Span::from(format!("{figure:>7} "))]
        };
        Line::from_iter(cell(one).into_iter().chain(cell(other)))
    };
    let statistics = &of_shard.statistics;
    let took = |of: fn(&RoundTrip) -> Duration| {
        round_trip.as_ref().map_or_else(|| "-".into(), |it| time(of(it).as_nanos() as u64))
    };
    let index = format!("{} of {} bits", statistics.subtables, statistics.directory_depth);
    let lines = vec![
        pair(("operations", of(|it| it.operations)), ("evicted", of(|it| it.evicted))),
        pair(("found", of(|it| it.reads_found)), ("expired", of(|it| it.expired))),
        pair(("absent", of(|it| it.reads_absent)), ("taken", of(|it| it.blocks_taken))),
        pair(("GET min", took(|it| it.min)), ("returned", of(|it| it.blocks_returned))),
        pair(("GET median", took(|it| it.median)), ("splits", of(|it| it.splits))),
        Line::from_iter([Span::from(" subtables  ").dim(), index.into()]),
    ];
    let [text, history] =
        Layout::vertical([Constraint::Length(lines.len() as u16), Constraint::Min(0)]).areas(inner);
    frame.render_widget(Paragraph::new(lines), text);
    let shown = usize::from(history.width).min(of_shard.history.len());
    let newest = &of_shard.history[of_shard.history.len() - shown..];
    frame.render_widget(Sparkline::default().data(newest).fg(IN_USE), history);
}

fn titles<const N: usize>(titles: [&'static str; N], left: usize) -> Row<'static> {
    row(titles.map(str::to_owned), left).cyan()
}

/// Returns a row whose first cells are at their left.
fn row<const N: usize>(cells: [String; N], left: usize) -> Row<'static> {
    let cell = |(at, text): (usize, String)| {
        let side = if at < left { Alignment::Left } else { Alignment::Right };
        Cell::from(Line::from(text).alignment(side))
    };
    Row::new(cells.into_iter().enumerate().map(cell))
}

fn draw_classes(frame: &mut Frame<'_>, area: Rect, classes: &[&ClassStatistics]) {
    let class_row = |class: &&ClassStatistics| {
        let in_use = class.blocks.saturating_sub(class.blocks_free);
        let share = in_use as f64 / class.blocks.max(1) as f64;
        let filled = ((share * BAR_WIDTH as f64).round() as usize).min(BAR_WIDTH);
        let after = match class.evicted {
            0 => "-".to_owned(),
            _ => duration(class.evicted_after_ms),
        };
        let block = block_name(class.class.content(), class.class.block_bytes());
        row(
            [
                block,
                FULL.repeat(filled),
                bytes(class.blocks * class.class.block_bytes()),
                in_use.to_string(),
                class.blocks_free.to_string(),
                class.blocks_resting.to_string(),
                class.evicted.to_string(),
                after,
            ],
            2,
        )
    };
    let widths = [
        Constraint::Length(16),
        Constraint::Length(BAR_WIDTH as u16),
        Constraint::Length(10),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Length(6),
    ];
    let heads = ["block", "used", "memory", "in use", "free", "resting", "evicted", "after"];
    let table = Table::new(classes.iter().map(class_row), widths).header(titles(heads, 2));
    frame.render_widget(table.block(panel("blocks, by size")), area);
}

fn draw_clients(frame: &mut Frame<'_>, area: Rect, clients: &[ClientFigures]) {
    let client_row = |ClientFigures { client, operations_per_s }: &ClientFigures| {
        let description = client.description.as_ref();
        let unknown = || "-".to_owned();
        let known = |text: Option<String>| text.unwrap_or_else(unknown);
        let latency = |ns: Option<u64>| known(ns.filter(|ns| *ns > 0).map(time));
        row(
            [
                client.id.to_string(),
                known(description.map(|it| printable(&it.program))),
                known(description.map(|it| printable(&it.host))),
                known(description.map(|it| it.pid.to_string())),
                client.role.name().to_owned(),
                client.fabric.name().to_owned(),
                duration(client.connected_ms),
                known(operations_per_s.map(number)),
                latency(description.map(|it| it.get_p50_ns)),
                latency(description.map(|it| it.get_p99_ns)),
                known(description.map(|it| it.blocks_held.to_string())),
            ],
            6,
        )
    };
    let widths = [
        Constraint::Length(4),
        Constraint::Fill(3),
        Constraint::Fill(2),
        Constraint::Length(7),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(6),
    ];
    let heads =
        ["id", "program", "host", "pid", "role", "fabric", "up", "ops/s", "p50", "p99", "held"];
    let table = Table::new(clients.iter().map(client_row), widths).header(titles(heads, 6));
    frame.render_widget(table.block(panel("clients")), area);
}

/// Formats a rate with three digits: `0`, `7.3`, `812`, `45.6k`, `1.23M`.
fn number(number: f64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let (mut scaled, mut unit) = (number, 0);
    // 999.5 has four digits when it is rounded.
    while scaled >= 999.5 && unit + 1 < UNITS.len() {
        (scaled, unit) = (scaled / 1000.0, unit + 1);
    }
    let decimals = match scaled {
        _ if scaled == 0.0 => 0,
        ..9.995 => 2 - usize::from(unit == 0),
        ..99.95 => 1,
        _ => 0,
    };
    format!("{scaled:.decimals$}{}", UNITS[unit])
}

/// Formats a time in nanoseconds: `812ns`, `45.6us`, `1.23ms`.
fn time(ns: u64) -> String {
    let (number, unit) = match ns {
        0..1000 => return format!("{ns}ns"),
        1000..1_000_000 => (ns as f64 / 1e3, "us"),
        1_000_000..1_000_000_000 => (ns as f64 / 1e6, "ms"),
        _ => (ns as f64 / 1e9, "s"),
    };
    let decimals = if number < 10.0 { 2 } else { usize::from(number < 100.0) };
    format!("{number:.decimals$}{unit}")
}

#[cfg(test)]
mod tests {
    use farside::{ClientDescription, ConnectedClient, FabricKind, Role, SizeClass};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn figures() -> Figures {
        let class = |bytes| ClassStatistics {
            class: SizeClass::for_bytes(bytes).unwrap(),
            blocks: 1000,
            blocks_free: 250,
            blocks_resting: 3,
            evicted: 77,
            evicted_after_ms: 90_000,
        };
        let statistics = ServerStatistics {
            clients: 2,
            chunks: 100,
            chunks_free: 50,
            chunks_index: 10,
            classes: vec![class(64), class(1024)],
            ..Default::default()
        };
        let client = ConnectedClient {
            id: 4095,
            role: Role::Writer,
            fabric: FabricKind::Tcp,
            is_asking: false,
            user: None,
            connected_ms: 192_000,
            description: Some(ClientDescription {
                pid: 4711,
                program: "evil\x1b[2J".into(),
                host: "host-7".into(),
                ..Default::default()
            }),
            description_age_ms: 7,
        };
        let clients = vec![ClientFigures { client, operations_per_s: Some(45_600.0) }];
        let of_shard = ShardFigures { statistics, clients, ..Default::default() };
        let lost = Err("no server answers".to_owned());
        let server = "shm:///run/kv.sock".to_owned();
        Figures { server, shards: vec![Ok(of_shard), lost], round_trip: None }
    }

    fn drawn(width: u16, height: u16, figures: &Figures, shard: usize) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, figures, shard)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_view_shows_memory_classes_and_clients() {
        let figures = figures();
        let view = drawn(120, height_of(&figures, 0), &figures, 0);
        for part in
            ["shm:///run/kv.sock", "shard 0 of 0-1", "1.0 KiB", "4095", "host-7", "45.6k", "3m12s"]
        {
            assert!(view.contains(part), "{part}\n{view}");
        }
        assert!(view.contains("evil\\x1b[2J") && !view.contains('\x1b'), "{view}");
        assert!(drawn(120, 40, &figures, 1).contains("no server answers"));
        assert!(drawn(120, 40, &Figures::default(), 0).contains("asking the server"));
    }

    #[test]
    fn any_size_can_be_drawn() {
        let figures = figures();
        for (width, height) in [(1, 1), (10, 3), (WIDTH_MIN, HEIGHT_MIN), (300, 100)] {
            let view = drawn(width, height, &figures, 0);
            let has_room = width >= WIDTH_MIN && height >= HEIGHT_MIN;
            assert_eq!(view.contains("4095"), has_room, "{view}");
        }
        assert!(drawn(60, 20, &figures, 0).contains("60 x 20"));
    }

    #[test]
    fn numbers_have_three_digits() {
        let numbers = [0.0, 0.04, 7.25, 99.94, 812.3, 999.4, 999.5, 45_600.0, 1.2345e6, 1e9, 5e15];
        let texts = numbers.map(number);
        let expected =
            ["0", "0.0", "7.2", "99.9", "812", "999", "1.00k", "45.6k", "1.23M", "1.00G", "5000T"];
        assert_eq!(texts, expected);
        let times = [0, 812, 1230, 45_600, 812_000, 1_234_000, 2_000_000_000].map(time);
        assert_eq!(times, ["0ns", "812ns", "1.23us", "45.6us", "812us", "1.23ms", "2.00s"]);
    }
}

//! Plots with both axes in powers of ten, as SVG.

use std::fmt::Write;

/// One pair of axes.
pub struct Panel {
    pub title: String,
    pub x: String,
    pub y: String,
    pub series: Vec<Series>,
}

pub struct Series {
    pub name: String,
    /// Both positive.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 400.0;
/// Around the axes; below them are the names of the series.
const LEFT: f64 = 52.0;
const RIGHT: f64 = 14.0;
const TOP: f64 = 30.0;
const PLOT: f64 = 240.0;
const LINE: f64 = 15.0;
const COLOURS: [&str; 5] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000"];

/// All panels, two in a row.
pub fn svg(panels: &[Panel]) -> String {
    let rows = panels.len().div_ceil(2) as f64;
    let mut out = String::new();
    let _ = writeln!(
        out,
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>"#,
        2.0 * WIDTH,
        rows * HEIGHT
    );
    for (number, panel) in panels.iter().enumerate() {
        let (x, y) = ((number % 2) as f64 * WIDTH, (number / 2) as f64 * HEIGHT);
        let _ = writeln!(out, r#"<g transform="translate({x} {y})">"#);
        panel.draw(&mut out);
        out.push_str("</g>\n");
    }
    out.push_str("</svg>\n");
    out
}

impl Panel {
    fn draw(&self, out: &mut String) {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let (x_from, x_to) = decades(points().map(|(x, _)| *x));
        let (y_from, y_to) = decades(points().map(|(_, y)| *y));
        let width = WIDTH - LEFT - RIGHT;
        let across = |x: f64| LEFT + (x.log10() - x_from) / (x_to - x_from) * width;
        let up = |y: f64| TOP + PLOT - (y.log10() - y_from) / (y_to - y_from) * PLOT;
        let (title, x_name, y_name) = (&self.title, &self.x, &self.y);
        let _ = writeln!(
            out,
            r#"<text x="{LEFT}" y="18" font-weight="bold">{title}</text>"#
        );
        let _ = writeln!(out, r#"<text x="4" y="18">{y_name}</text>"#);
        for power in x_from as i32..=x_to as i32 {
            let (x, end) = (across(10_f64.powi(power)), TOP + PLOT);
            let _ = writeln!(
                out,
                r##"<path d="M{x:.1} {TOP}V{end}" stroke="#ddd"/><text x="{x:.1}" y="{}" text-anchor="middle">{}</text>"##,
                end + LINE,
                10_f64.powi(power)
            );
        }
        for power in y_from as i32..=y_to as i32 {
            let (y, start, end) = (up(10_f64.powi(power)), LEFT - 4.0, WIDTH - RIGHT);
            let _ = writeln!(
                out,
                r##"<path d="M{LEFT} {y:.1}H{end}" stroke="#ddd"/><text x="{start}" y="{:.1}" text-anchor="end">{}</text>"##,
                y + 4.0,
                10_f64.powi(power)
            );
        }
        let below = TOP + PLOT + 2.0 * LINE;
        let _ = writeln!(
            out,
            r#"<text x="{}" y="{below}" text-anchor="middle">{x_name}</text>"#,
            LEFT + width / 2.0
        );
        for (number, series) in self.series.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let line: Vec<String> = series
                .points
                .iter()
                .map(|(x, y)| format!("{:.1},{:.1}", across(*x), up(*y)))
                .collect();
            let (line, name) = (line.join(" "), &series.name);
            let y = below + LINE * (1 + number) as f64;
            let _ = writeln!(
                out,
                r#"<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/><path d="M{LEFT} {}h18" stroke="{colour}" stroke-width="3"/><text x="{}" y="{y}">{name}</text>"#,
                y - 4.0,
                LEFT + 24.0
            );
        }
    }
}

/// The powers of ten around all values.
fn decades(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let least = values.clone().fold(f64::INFINITY, f64::min);
    let most = values.fold(0.0, f64::max);
    let from = least.log10().floor();
    (from, most.log10().ceil().max(from + 1.0))
}

//! Latency over time as an SVG: a point per request, on a logarithmic scale, with lines at the
//! percentiles. Readable on light and on dark ground. Pure.

use std::fmt::Write as _;
use std::time::Duration;

use crate::load::{Outcome, Summary};

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 110.0;
const TOP: f64 = 56.0;
const BOTTOM: f64 = 52.0;

/// The ground is whatever is behind; the colours follow the reader's theme.
const STYLE: &str = "<style>
text { font: 13px system-ui, sans-serif; fill: #3b4350 }
.title { font-size: 16px; font-weight: 600 }
.grid { stroke: #8894a6; stroke-opacity: .3 }
.axis { stroke: #8894a6 }
.point { fill: #2f6fdb; fill-opacity: .7 }
.failed { fill: #d6336c }
.mark { stroke: #c26a00; stroke-dasharray: 5 4 }
.name { fill: #b35f00 }
@media (prefers-color-scheme: dark) {
text { fill: #c8d0dc }
.point { fill: #7fb0ff }
.failed { fill: #ff7aa8 }
.mark { stroke: #f0a84a }
.name { fill: #f0a84a }
}
</style>";

/// Where a time and a latency are on the picture.
#[derive(Debug)]
struct Scale {
    span: f64,
    /// Powers of ten, in milliseconds.
    low: i32,
    high: i32,
}

impl Scale {
    fn of(outcomes: &[Outcome], span: Duration) -> Self {
        let latencies = outcomes.iter().map(|outcome| millis(outcome.latency));
        let (low, high) =
            latencies.fold((f64::INFINITY, 0.0_f64), |(low, high), ms| (low.min(ms), high.max(ms)));
        let (low, high) = if low.is_finite() { (decade(low), decade(high) + 1) } else { (0, 1) };
        Self { span: span.as_secs_f64().max(0.001), low, high }
    }

    fn x(&self, seconds: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * (seconds / self.span)
    }

    fn y(&self, ms: f64) -> f64 {
        let share = (ms.max(0.001).log10() - f64::from(self.low)) / f64::from(self.high - self.low);
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share.clamp(0.0, 1.0)
    }
}

pub(crate) fn draw(title: &str, outcomes: &[Outcome], summary: &Summary, span: Duration) -> String {
    let scale = Scale::of(outcomes, span);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\">\n<title>{0}</title>\n{STYLE}\n\
         <text class=\"title\" x=\"{LEFT}\" y=\"28\">{0}</text>\n",
        escape(title)
    );
    let mut add = |element: String| writeln!(svg, "{element}").expect("a string takes any text");
    axes(&scale, &mut add);
    for Outcome { due, latency, error } in outcomes {
        let (x, y) = (scale.x(due.as_secs_f64()), scale.y(millis(*latency)));
        let class = if error.is_some() { "point failed" } else { "point" };
        add(format!("<circle class=\"{class}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>"));
    }
    marks(&scale, summary, &mut add);
    add("</svg>".to_owned());
    svg
}

fn axes(scale: &Scale, add: &mut impl FnMut(String)) {
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    for power in scale.low..=scale.high {
        let ms = 10_f64.powi(power);
        let y = scale.y(ms);
        add(line("grid", LEFT, y, right, y));
        let label = if ms >= 1000.0 { format!("{} s", ms / 1000.0) } else { format!("{ms} ms") };
        add(format!(
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 8.0,
            y + 4.0
        ));
    }
    for tenth in 0..=10 {
        let seconds = scale.span * f64::from(tenth) / 10.0;
        let x = scale.x(seconds);
        add(line("axis", x, bottom, x, bottom + 5.0));
        let label = format!("{:.*}", usize::from(scale.span < 10.0), seconds);
        add(format!(
            "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
            bottom + 20.0
        ));
    }
    add(line("axis", LEFT, bottom, right, bottom));
    add(line("axis", LEFT, TOP, LEFT, bottom));
    let middle = scale.x(scale.span / 2.0);
    add(format!(
        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">seconds at which the request was due</text>",
        HEIGHT - 10.0
    ));
}

/// Lines at the percentiles. Names that would cover each other are moved apart.
fn marks(scale: &Scale, summary: &Summary, add: &mut impl FnMut(String)) {
    let mut above = f64::INFINITY;
    for (name, ms) in [("p50", summary.p50), ("p95", summary.p95), ("p99", summary.p99)] {
        let y = scale.y(ms);
        add(line("mark", LEFT, y, WIDTH - RIGHT, y));
        let at = (y + 4.0).min(above - 15.0);
        above = at;
        let x = WIDTH - RIGHT + 8.0;
        let shown = if ms < 1000.0 { format!("{ms:.1} ms") } else { format!("{:.1} s", ms / 1e3) };
        add(format!("<text class=\"name\" x=\"{x}\" y=\"{at:.1}\">{name} {shown}</text>"));
    }
}

fn line(class: &str, x1: f64, y1: f64, x2: f64, y2: f64) -> String {
    format!("<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\"/>")
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The power of ten at or below.
fn decade(ms: f64) -> i32 {
    let mut power = -3;
    while 10_f64.powi(power + 1) <= ms {
        power += 1;
    }
    power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(millis: &[u64]) -> Vec<Outcome> {
        let outcome = |(number, ms): (usize, &u64)| Outcome {
            due: Duration::from_secs(number as u64),
            latency: Duration::from_millis(*ms),
            error: None,
        };
        millis.iter().enumerate().map(outcome).collect()
    }

    #[test]
    fn every_request_is_a_point_within_the_frame() {
        let outcomes = outcomes(&[1, 10, 250, 9999]);
        let scale = Scale::of(&outcomes, Duration::from_secs(10));
        assert_eq!((scale.low, scale.high), (0, 4));
        for outcome in &outcomes {
            let (x, y) = (scale.x(outcome.due.as_secs_f64()), scale.y(millis(outcome.latency)));
            assert!((LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y));
        }
        let summary = Summary::of(&outcomes.iter().map(|o| o.latency).collect::<Vec<_>>());
        let svg = draw("a < b", &outcomes, &summary, Duration::from_secs(10));
        assert_eq!(svg.matches("<circle").count(), 4);
        assert!(svg.contains("a &lt; b") && svg.trim_end().ends_with("</svg>"));
    }

    #[test]
    fn later_is_further_right_and_slower_is_higher() {
        let scale = Scale { span: 10.0, low: 0, high: 3 };
        assert!(scale.x(2.0) > scale.x(1.0));
        assert!(scale.y(100.0) < scale.y(10.0));
    }
}

//! Pictures as inline SVG. Colours are classes of the page's style sheet, so that a picture follows
//! the reader's light or dark scheme.

use super::markup::Markup;
use super::{count, number, size};
use crate::oracle::HeatMap;

/// Width of every picture in its own units.
const WIDTH: f64 = 720.0;

/// Steps of a heat map: a ratio up to the limit gets the class. Above 1 a number is wrong.
pub const STEPS: [(f64, &str); 10] = [
    (0.0, "r0"),
    (0.05, "r1"),
    (0.1, "r2"),
    (0.2, "r3"),
    (0.4, "r4"),
    (0.6, "r5"),
    (0.8, "r6"),
    (1.0, "r7"),
    (10.0, "f1"),
    (f64::INFINITY, "f2"),
];

/// One line of [`intervals`]: an error beside the bound at the same element.
#[derive(Clone, Debug)]
pub struct Interval {
    /// What was judged.
    pub label: String,
    /// |value − truth| of the worst element; ∞ if the value is not finite.
    pub error: f64,
    /// What it cannot exceed.
    pub bound: f64,
    /// Error over bound.
    pub ratio: f64,
}

fn picture(height: f64, description: &str) -> Markup {
    let mut svg = Markup::default();
    let view = format!("0 0 {WIDTH} {height}");
    svg.open("svg", &[("viewBox", &view), ("role", &"img"), ("aria-label", &description)]);
    svg
}

/// Errors (dots) against their bounds (bars) on a logarithmic axis. A dot on the bar is as far as a
/// correct engine can be; beyond it is red.
pub fn intervals(rows: &[Interval]) -> Markup {
    const ROW: f64 = 24.0;
    const TOP: f64 = 8.0;
    // The longest label: a_prime of 4 down backward, activation.
    const LEFT: f64 = 265.0;
    const RIGHT: f64 = 640.0;
    let positive = |value: &f64| *value > 0.0 && value.is_finite();
    let sizes: Vec<f64> = rows.iter().flat_map(|row| [row.error, row.bound]).filter(positive).collect();
    let smallest = sizes.iter().copied().fold(f64::INFINITY, f64::min);
    let largest = sizes.iter().copied().fold(0.0, f64::max);
    let (mut low, mut high) = (-1.0, 0.0);
    if smallest.is_finite() {
        low = smallest.log10().floor();
        high = largest.log10().ceil().max(low + 1.0);
    }
    // Zero stands at the left end of the axis, what is not finite at the right.
    let at = |value: f64| {
        let decade = if value > 0.0 { value.log10().clamp(low, high) } else { low };
        LEFT + (decade - low) / (high - low) * (RIGHT - LEFT)
    };
    let bottom = TOP + ROW * rows.len() as f64;
    let mut svg = picture(bottom + 26.0, "error against bound of the worst element of every result");
    let step = ((high - low) / 8.0).ceil().max(1.0);
    let mut decade = low;
    while decade <= high {
        let x = coordinate(at(10f64.powf(decade)));
        svg.empty("line", &[("class", &"grid"), ("x1", &x), ("x2", &x), ("y1", &TOP), ("y2", &bottom)]);
        let label = format!("1e{decade}");
        svg.leaf("text", &[("class", &"tick"), ("x", &x), ("y", &(bottom + 16.0)), ("text-anchor", &"middle")], label);
        decade += step;
    }
    for (place, row) in rows.iter().enumerate() {
        let y = TOP + ROW * (place as f64 + 0.5);
        let class = if row.ratio > 1.0 { "fail" } else { "pass" };
        let (error, bound) = (coordinate(at(row.error)), coordinate(at(row.bound)));
        svg.open("g", &[("class", &class)]);
        let (said, beside) = (number(row.error), number(row.bound));
        svg.leaf("title", &[], format!("{}: error {said}, bound {beside}, ratio {}", row.label, number(row.ratio)));
        svg.leaf("text", &[("x", &(LEFT - 12.0)), ("y", &(y + 4.0)), ("text-anchor", &"end")], &row.label);
        svg.empty("line", &[("class", &"reach"), ("x1", &error), ("x2", &bound), ("y1", &y), ("y2", &y)]);
        let (from, to) = (y - 8.0, y + 8.0);
        svg.empty("line", &[("class", &"bound"), ("x1", &bound), ("x2", &bound), ("y1", &from), ("y2", &to)]);
        svg.empty("circle", &[("class", &"error"), ("cx", &error), ("cy", &y), ("r", &5)]);
        svg.leaf("text", &[("class", &"value"), ("x", &(RIGHT + 16.0)), ("y", &(y + 4.0))], number(row.ratio));
        svg.close("g");
    }
    svg.close("svg");
    svg
}

/// The worst ratios by place.
pub fn heat(map: &HeatMap) -> Markup {
    const LEFT: f64 = 84.0;
    const RIGHT: f64 = 712.0;
    const TOP: f64 = 6.0;
    let [rows, columns] = map.bins();
    let width = (RIGHT - LEFT) / columns.max(1) as f64;
    let height = if rows == 1 { 24.0 } else { (192.0 / rows.max(1) as f64).min(24.0) };
    let bottom = TOP + height * rows as f64;
    let description = format!("worst error over bound by {} and {}", map.axes[0], map.axes[1]);
    let mut svg = picture(bottom + 24.0, &description);
    svg.empty(
        "rect",
        &[("class", &"unjudged"), ("x", &LEFT), ("y", &TOP), ("width", &(RIGHT - LEFT)), ("height", &(bottom - TOP))],
    );
    for (step, &(_, class)) in STEPS.iter().enumerate() {
        let mut path = String::new();
        for row in 0..rows {
            let mut column = 0;
            while column < columns {
                let start = column;
                while column < columns && map.worst(row, column).is_some_and(|ratio| step_of(ratio) == step) {
                    column += 1;
                }
                if column > start {
                    let (x, y) = (LEFT + width * start as f64, TOP + height * row as f64);
                    let length = width * (column - start) as f64;
                    path += &format!("M{x:.1} {y:.1}h{length:.1}v{height:.1}h-{length:.1}z");
                }
                column = column.max(start + 1);
            }
        }
        if !path.is_empty() {
            svg.empty("path", &[("class", &class), ("d", &path)]);
        }
    }
    let label = |svg: &mut Markup, x: f64, y: f64, anchor: &str, text: String| {
        svg.leaf("text", &[("class", &"tick"), ("x", &x), ("y", &y), ("text-anchor", &anchor)], text);
    };
    if !map.axes[0].is_empty() {
        label(&mut svg, LEFT - 8.0, TOP + 10.0, "end", format!("{} 0", map.axes[0]));
        if rows > 1 {
            label(&mut svg, LEFT - 8.0, bottom - 1.0, "end", (map.lengths[0] - 1).to_string());
        }
    }
    label(&mut svg, LEFT, bottom + 16.0, "start", format!("{} 0", map.axes[1]));
    label(&mut svg, RIGHT, bottom + 16.0, "end", map.lengths[1].saturating_sub(1).to_string());
    svg.close("svg");
    svg
}

fn step_of(ratio: f64) -> usize {
    STEPS.iter().position(|&(limit, _)| ratio <= limit).unwrap_or(STEPS.len() - 1)
}

/// Tokens of every expert, and the rows of padding that fill its last tile.
pub fn columns(counts: &[usize], tile: usize) -> Markup {
    const LEFT: f64 = 64.0;
    const RIGHT: f64 = 712.0;
    const TOP: f64 = 10.0;
    const BOTTOM: f64 = 150.0;
    /// More experts than this are no longer told apart.
    const MOST: usize = 512;
    let shown = &counts[..counts.len().min(MOST)];
    let padded = |count: usize| count.next_multiple_of(tile.max(1));
    let largest = shown.iter().map(|&count| padded(count)).max().unwrap_or(0).max(1);
    let width = (RIGHT - LEFT) / shown.len().max(1) as f64;
    let bar = (width * 0.8).clamp(0.5, 28.0);
    let up = |rows: usize| (BOTTOM - TOP) * rows as f64 / largest as f64;
    let mut svg = picture(BOTTOM + 24.0, "tokens per expert, with padding");
    for part in 0..=2 {
        let rows = largest * part / 2;
        let y = coordinate(BOTTOM - up(rows));
        svg.empty("line", &[("class", &"grid"), ("x1", &LEFT), ("x2", &RIGHT), ("y1", &y), ("y2", &y)]);
        let at = coordinate(BOTTOM - up(rows) + 4.0);
        svg.leaf("text", &[("class", &"tick"), ("x", &(LEFT - 8.0)), ("y", &at), ("text-anchor", &"end")], rows);
    }
    for (expert, &rows) in shown.iter().enumerate() {
        let x = coordinate(LEFT + width * (expert as f64 + 0.5) - bar / 2.0);
        let (full, used) = (up(padded(rows)), up(rows));
        svg.open("g", &[]);
        svg.leaf("title", &[], format!("expert {expert}: {rows} tokens, {} rows of padding", padded(rows) - rows));
        let rect = |svg: &mut Markup, class: &str, top: f64, height: f64| {
            let (top, height) = (coordinate(BOTTOM - top), coordinate(height));
            svg.empty(
                "rect",
                &[("class", &class), ("x", &x), ("y", &top), ("width", &coordinate(bar)), ("height", &height)],
            );
        };
        rect(&mut svg, "padding", full, full - used);
        rect(&mut svg, "tokens", used, used);
        svg.close("g");
    }
    let last = shown.len().saturating_sub(1);
    svg.leaf("text", &[("class", &"tick"), ("x", &LEFT), ("y", &(BOTTOM + 16.0))], "expert 0");
    let end = if counts.len() > MOST { format!("{last} of {}", counts.len()) } else { last.to_string() };
    let right: [(&'static str, &dyn std::fmt::Display); 4] =
        [("class", &"tick"), ("x", &RIGHT), ("y", &(BOTTOM + 16.0)), ("text-anchor", &"end")];
    svg.leaf("text", &right, end);
    svg.close("svg");
    svg
}

/// The classes of the tensors of [`stacks`], in their order.
pub const TENSORS: [&str; 5] = ["m0", "m1", "m2", "m3", "m4"];

/// What each system keeps, tensor by tensor, as stacked bars.
pub fn stacks(systems: &[(&str, [(&'static str, u128); 5])]) -> Markup {
    const ROW: f64 = 30.0;
    // The longest name: DeepGEMM-based (without padding).
    const LEFT: f64 = 265.0;
    const RIGHT: f64 = 620.0;
    let total = |tensors: &[(&str, u128)]| tensors.iter().fold(0u128, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let most = systems.iter().map(|(_, tensors)| total(tensors)).max().unwrap_or(0).max(1);
    let mut svg = picture(ROW * systems.len() as f64 + 4.0, "bytes kept from forward to backward, system by system");
    for (place, (name, tensors)) in systems.iter().enumerate() {
        let y = ROW * place as f64 + 4.0;
        svg.leaf("text", &[("x", &(LEFT - 12.0)), ("y", &(y + 15.0)), ("text-anchor", &"end")], name);
        let mut x = LEFT;
        for (class, (tensor, bytes)) in TENSORS.iter().zip(tensors).filter(|(_, (_, bytes))| *bytes > 0) {
            let width = (RIGHT - LEFT) * (*bytes as f64 / most as f64);
            let (at, wide) = (coordinate(x), coordinate((width - 1.0).max(0.5)));
            svg.open("g", &[]);
            svg.leaf("title", &[], format!("{name}: {tensor} {}", size(*bytes)));
            svg.empty("rect", &[("class", class), ("x", &at), ("y", &y), ("width", &wide), ("height", &(ROW - 8.0))]);
            if width > 64.0 {
                let middle = coordinate(x + width / 2.0);
                let label: [(&'static str, &dyn std::fmt::Display); 4] =
                    [("class", &"inside"), ("x", &middle), ("y", &(y + 15.0)), ("text-anchor", &"middle")];
                svg.leaf("text", &label, tensor);
            }
            svg.close("g");
            x += width;
        }
        let kept = size(total(tensors));
        svg.leaf("text", &[("class", &"value"), ("x", &coordinate(x + 8.0)), ("y", &(y + 15.0))], kept);
    }
    svg.close("svg");
    svg
}

/// The share of rows that padding adds.
pub fn padding(counts: &[usize], tile: usize) -> String {
    let rows: u64 = counts.iter().map(|&count| count as u64).sum();
    let filled: u64 = counts.iter().map(|&count| count.next_multiple_of(tile.max(1)) as u64).sum();
    let share = if rows == 0 { 0.0 } else { (filled - rows) as f64 / rows as f64 * 100.0 };
    format!("{} rows, {} of padding to tiles of {tile} ({share:.1}%)", count(rows), count(filled - rows))
}

/// Tenths of a unit are finer than any screen.
fn coordinate(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_above_one_never_has_the_colour_of_a_right_number() {
        let class = |ratio: f64| STEPS[step_of(ratio)].1;
        assert_eq!([0.0, 1e-9, 1.0].map(class), ["r0", "r1", "r7"]);
        assert_eq!([1.0 + 1e-9, 11.0, f64::INFINITY].map(class), ["f1", "f2", "f2"]);
    }

    #[test]
    fn no_error_and_no_bound_is_outside_the_picture() {
        let sizes = [0.0, f64::MIN_POSITIVE, 1e-3, 1e300, f64::INFINITY];
        let rows: Vec<Interval> = sizes
            .into_iter()
            .flat_map(|error| sizes.map(|bound| Interval { label: "o".into(), error, bound, ratio: 2.0 }))
            .collect();
        for place in intervals(&rows).finish().split("cx=\"").skip(1) {
            let x: f64 = place.split('"').next().unwrap().parse().unwrap();
            assert!((0.0..=WIDTH).contains(&x), "{x}");
        }
        assert!(!intervals(&[]).finish().contains("NaN"));
    }

    #[test]
    fn padding_fills_the_last_tile_of_every_expert_with_tokens() {
        assert_eq!(padding(&[129, 0, 128], 128), "257 rows, 127 of padding to tiles of 128 (49.4%)");
        assert_eq!(padding(&[0, 0], 128), "0 rows, 0 of padding to tiles of 128 (0.0%)");
    }
}

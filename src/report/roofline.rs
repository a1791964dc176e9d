//! A roofline as an SVG file of its own, in the reader's light or dark scheme.
//!
//! Both axes are relative to what the card gave in the same run: across, operations per byte over
//! those at which a plain product and a plain copy take the same time; up, the rate over the product's.
//! So one picture holds runs at different clocks, and the roof is min(x, 1).

use super::markup::Markup;

/// One kernel of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Point {
    /// The layer; its points carry one letter.
    pub layer: String,
    /// The kernel; its points have one colour.
    pub kernel: String,
    /// Operations per byte · copy / product.
    pub intensity: f64,
    /// Operations per second / product.
    pub rate: f64,
}

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 500.0;
const TOP: f64 = 16.0;
const BOTTOM: f64 = 370.0;
/// What is shown, logarithmically.
const X: [f64; 2] = [0.4, 10.0];
const Y: [f64; 2] = [0.3, 1.15];
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c564b", "#7f7f7f"];
const STYLE: &str = "<style>text{font:12px sans-serif;fill:#222}.axis,.roof{stroke:#222;fill:none}.roof{stroke-width:2}\
.grid{stroke:#ccc}.letter{fill:#fff;font-size:9px}\
@media(prefers-color-scheme:dark){text{fill:#ddd}.axis,.roof{stroke:#ddd}.grid{stroke:#444}.letter{fill:#fff}}</style>\n";

/// 0 at the low end and beyond it, 1 at the high one.
fn share(value: f64, [low, high]: [f64; 2]) -> f64 {
    (value.clamp(low, high) / low).ln() / (high / low).ln()
}

fn across(x: f64) -> f64 {
    LEFT + share(x, X) * (RIGHT - LEFT)
}

fn up(y: f64) -> f64 {
    BOTTOM - share(y, Y) * (BOTTOM - TOP)
}

/// Where each name was first seen: its letter, or its colour.
fn order<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut seen = Vec::new();
    names.for_each(|name| {
        if !seen.contains(&name) {
            seen.push(name)
        }
    });
    seen
}

/// The picture; points beyond its edges stand on them.
///
/// ```
/// use sonicmoe::report::roofline::{Point, roofline};
/// let point = Point { layer: "olmoe".into(), kernel: "up_forward".into(), intensity: 3.0, rate: 0.9 };
/// let svg = roofline(&[point]);
/// assert!(svg.starts_with("<svg xmlns=") && svg.contains("olmoe: up_forward, 0.90 of the product"));
/// ```
pub fn roofline(points: &[Point]) -> String {
    let mut svg = Markup::default();
    let view = format!("0 0 {WIDTH} {HEIGHT}");
    let about = "rates of the kernels under the roof of the card's product and copy";
    svg.open(
        "svg",
        &[("xmlns", &"http://www.w3.org/2000/svg"), ("viewBox", &view), ("role", &"img"), ("aria-label", &about)],
    );
    svg.literal(STYLE);
    for (value, label) in [(0.5, "0.5"), (1.0, "1"), (2.0, "2"), (5.0, "5"), (10.0, "10")] {
        let x = place(across(value));
        svg.empty("line", &[("class", &"grid"), ("x1", &x), ("x2", &x), ("y1", &TOP), ("y2", &BOTTOM)]);
        svg.leaf("text", &[("x", &x), ("y", &(BOTTOM + 16.0)), ("text-anchor", &"middle")], label);
    }
    for (value, label) in [(0.3, "0.3"), (0.4, "0.4"), (0.5, "0.5"), (0.6, "0.6"), (0.8, "0.8"), (1.0, "1")] {
        let y = place(up(value));
        svg.empty("line", &[("class", &"grid"), ("x1", &LEFT), ("x2", &RIGHT), ("y1", &y), ("y2", &y)]);
        svg.leaf("text", &[("x", &(LEFT - 8.0)), ("y", &place(up(value) + 4.0)), ("text-anchor", &"end")], label);
    }
    let corner = [across(X[0]), up(X[0]), across(1.0), up(1.0), RIGHT].map(place);
    let [x0, y0, x1, y1, x2] = &corner;
    svg.empty("path", &[("class", &"roof"), ("d", &format!("M{x0} {y0}L{x1} {y1}H{x2}"))]);
    let titles = [
        "operations per byte, over the product's rate per copied byte",
        "rate over that of the product of 8192³ in the same run",
    ];
    let middle = place((LEFT + RIGHT) / 2.0);
    svg.leaf("text", &[("x", &middle), ("y", &(BOTTOM + 38.0)), ("text-anchor", &"middle")], titles[0]);
    let turn = format!("translate(14 {}) rotate(-90)", place((TOP + BOTTOM) / 2.0));
    svg.leaf("text", &[("transform", &turn), ("text-anchor", &"middle")], titles[1]);

    let layers = order(points.iter().map(|point| point.layer.as_str()));
    let kernels = order(points.iter().map(|point| point.kernel.as_str()));
    let of = |names: &[&str], name: &str| names.iter().position(|other| *other == name).unwrap_or(0);
    let letter = |layer: &str| char::from(b'a' + (of(&layers, layer) % 26) as u8);
    let colour = |kernel: &str| COLOURS[of(&kernels, kernel) % COLOURS.len()];
    for Point { layer, kernel, intensity, rate } in points {
        let (x, y) = (across(*intensity), up(*rate));
        svg.open("g", &[]);
        svg.leaf("title", &[], format!("{layer}: {kernel}, {rate:.2} of the product"));
        svg.empty("circle", &[("cx", &place(x)), ("cy", &place(y)), ("r", &6), ("fill", &colour(kernel))]);
        let at = [("class", &"letter" as &dyn std::fmt::Display), ("text-anchor", &"middle")];
        svg.leaf("text", &[at[0], at[1], ("x", &place(x)), ("y", &place(y + 3.0))], letter(layer));
        svg.close("g");
    }
    let mut y = TOP + 8.0;
    for kernel in &kernels {
        svg.empty("circle", &[("cx", &(RIGHT + 22.0)), ("cy", &(y - 4.0)), ("r", &6), ("fill", &colour(kernel))]);
        svg.leaf("text", &[("x", &(RIGHT + 36.0)), ("y", &y)], kernel);
        y += 20.0;
    }
    y += 12.0;
    for layer in &layers {
        svg.leaf("text", &[("x", &(RIGHT + 18.0)), ("y", &y)], letter(layer));
        svg.leaf("text", &[("x", &(RIGHT + 36.0)), ("y", &y)], layer);
        y += 20.0;
    }
    svg.close("svg");
    svg.finish()
}

/// A coordinate, to a tenth.
fn place(value: f64) -> String {
    format!("{value:.1}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_on_the_roof_lies_on_it_and_every_layer_and_kernel_is_named_once_in_the_legend() {
        // The roof falls with x: as far down as the axes say, from the ridge.
        let [x, y] = [across(1.0) - across(0.5), up(0.5) - up(1.0)];
        assert!((x / y - (RIGHT - LEFT) / (BOTTOM - TOP) * (Y[1] / Y[0]).ln() / (X[1] / X[0]).ln()).abs() < 1e-9);
        assert_eq!([across(1e9), across(0.0), up(1e9), up(0.0)], [RIGHT, LEFT, TOP, BOTTOM]);
        let point = |layer: &str, kernel: &str| Point {
            layer: layer.to_owned(),
            kernel: kernel.to_owned(),
            intensity: 0.5,
            rate: 0.5,
        };
        let svg = roofline(&[point("one", "up"), point("one", "down"), point("two <", "up")]);
        for legend in [">up</text>", ">down</text>", ">one</text>", ">two &lt;</text>"] {
            assert_eq!(svg.matches(legend).count(), 1, "{legend} in {svg}");
        }
        assert_eq!(svg.matches("<title>").count(), 3);
        assert_eq!(svg.matches(&format!("cy=\"{}\"", place(up(0.5)))).count(), 3);
    }
}

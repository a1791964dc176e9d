//! How findings are shown: tables and pages for people, JSON and JUnit XML for programs.

pub mod chart;
pub mod junit;
pub mod markup;
pub mod roofline;
pub mod table;

pub use markup::Markup;
pub use table::{Align, Table};

/// A number for a table: three significant digits, a fixed width's worth of characters.
///
/// ```
/// use sonicmoe::report::number;
/// assert_eq!(number(0.0), "0");
/// assert_eq!(number(0.4567), "0.457");
/// assert_eq!(number(1.23e-8), "1.23e-8");
/// assert_eq!(number(f64::INFINITY), "∞");
/// ```
pub fn number(value: f64) -> String {
    let magnitude = value.abs();
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "∞" } else { "−∞" }.to_owned()
    } else if value == 0.0 {
        "0".to_owned()
    } else if (1e-3..1e4).contains(&magnitude) {
        let decimals = (2 - magnitude.log10().floor() as i32).clamp(0, 6) as usize;
        format!("{value:.decimals$}")
    } else {
        format!("{value:.2e}")
    }
}

/// A number for JSON; those that JSON has no word for become the strings "inf", "-inf" and "NaN".
pub fn float(value: f64) -> serde_json::Value {
    serde_json::Number::from_f64(value).map_or_else(|| value.to_string().into(), serde_json::Value::Number)
}

/// Bytes in the largest binary unit that leaves a number of at least 1.
///
/// ```
/// use sonicmoe::report::size;
/// assert_eq!([size(0), size(1023), size(12 << 20), size(1536)], ["0 B", "1023 B", "12 MiB", "1.5 KiB"]);
/// ```
pub fn size(bytes: u128) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() == 0.0 { format!("{value} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A whole number with its thousands apart.
///
/// ```
/// assert_eq!(sonicmoe::report::count(1234567), "1,234,567");
/// ```
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut grouped = String::with_capacity(digits.len() * 4 / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

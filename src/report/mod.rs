//! How findings are shown: tables for people, JSON for programs.

pub mod table;

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

//! The report as one page that needs nothing but itself.

use std::path::Path;

use super::trial::Trial;
use super::{Checked, text};
use crate::dump::Dump;
use crate::error::Error;
use crate::oracle::Verdict;
use crate::oracle::memory::{Layer, System};
use crate::report::chart::{self, Interval};
use crate::report::{Markup, count, number};
use crate::routing::Routing;

/// Rows that SonicMoE's kernels take at once: a last tile of fewer is filled up.
const TILE: usize = 128;

/// The page, from the articles of all files.
pub(super) fn page(worst: Verdict, tally: &[Verdict], articles: &[Markup]) -> String {
    let mut page = Markup::default();
    page.literal("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    page.literal("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n");
    // Whatever a file could smuggle in: the page itself forbids scripts and everything from elsewhere.
    page.literal(
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n",
    );
    page.literal("<title>sonicmoe check</title>\n<style>\n");
    page.literal(include_str!("page.css"));
    page.literal("</style>\n</head>\n<body>\n<header>\n<h1>sonicmoe check</h1>\n");
    verdict(&mut page, worst);
    page.literal("</header>\n");
    let summary = text::summary(tally, worst);
    page.leaf("p", &[("class", &"soft")], summary.trim());
    articles.iter().for_each(|article| page.append(article));
    page.literal("</body>\n</html>\n");
    page.finish()
}

/// All that is said of one file.
pub(super) fn article(path: &Path, checked: &Result<Checked, Error>) -> Markup {
    let mut article = Markup::default();
    let outcome = checked.as_ref().map_or_else(Verdict::from, |checked| checked.verdict);
    article.open("article", &[]);
    article.literal("<header>\n");
    article.leaf("h2", &[], path.display());
    verdict(&mut article, outcome);
    article.literal("</header>\n");
    match checked {
        Ok(checked) => of_checked(&mut article, checked),
        Err(error) => article.leaf("p", &[], error),
    }
    article.close("article");
    article
}

fn verdict(markup: &mut Markup, verdict: Verdict) {
    let class = match verdict {
        Verdict::Pass => "verdict pass",
        Verdict::Incomplete | Verdict::Vacuous => "verdict warn",
        _ => "verdict fail",
    };
    markup.leaf("span", &[("class", &class)], verdict);
}

fn of_checked(article: &mut Markup, checked: &Checked) {
    let Checked { dump, trial, .. } = checked;
    for line in text::heading(dump).into_iter().chain(text::routing(dump, trial)) {
        article.leaf("p", &[("class", &"soft")], line);
    }
    article.leaf("p", &[], text::summary_of(checked));
    if !trial.judged.is_empty() {
        results(article, trial);
    }
    let (remarks, repeat) = text::remarks_on(checked);
    if !remarks.is_empty() {
        article.leaf("h3", &[], "What was found");
        article.open("ul", &[]);
        remarks.iter().for_each(|remark| article.leaf("li", &[], remark));
        article.close("ul");
    }
    if let Some(repeat) = repeat {
        article.open("p", &[]);
        article.literal("Repeat: ");
        article.leaf("code", &[], repeat);
        article.close("p");
        if checked.verdict == Verdict::NumericFailure {
            article.open("p", &[]);
            article.literal("Why: ");
            article.leaf("code", &[], format!("sonicmoe explain {}", dump.path.display()));
            article.close("p");
        }
    }
    if !trial.judged.is_empty() {
        places(article, trial);
    }
    load(article, &trial.chosen.routing);
    memory(article, dump);
}

fn results(article: &mut Markup, trial: &Trial) {
    article.leaf("h3", &[], "Error against bound");
    article.literal(
        "<p class=\"soft\">The worst element of every result: the dot is its error, the bar what a correct engine \
         cannot exceed there, the number their ratio. Above 1 a number is wrong.</p>\n",
    );
    let rows: Vec<Interval> = trial
        .judged
        .iter()
        .filter_map(|judged| {
            let worst = judged.judgement.worst.as_ref()?;
            let error = if worst.value.is_finite() { (worst.value - worst.reference).abs() } else { f64::INFINITY };
            Some(Interval { label: text::name_of(judged), error, bound: worst.bound, ratio: worst.ratio })
        })
        .collect();
    picture(article, &chart::intervals(&rows));
    let table = text::results(trial);
    article.literal("<div class=\"wide\">\n<table>\n<tr>");
    table.headers().for_each(|header| article.leaf("th", &[], header));
    article.literal("</tr>\n");
    for cells in table.cells() {
        article.literal("<tr>");
        cells.iter().for_each(|cell| article.leaf("td", &[], cell));
        article.literal("</tr>\n");
    }
    article.literal("</table>\n</div>\n");
}

fn places(article: &mut Markup, trial: &Trial) {
    article.leaf("h3", &[], "Where the errors are");
    article.literal("<p class=\"soft\">The worst ratio of error to bound in every part of a result.</p>\n");
    article.literal("<div class=\"legend\">");
    for (limit, class) in chart::STEPS {
        let label = if limit == 0.0 { "exact".to_owned() } else { format!("≤ {}", number(limit)) };
        legend(article, class, &label);
    }
    legend(article, "unjudged", "not judged");
    article.literal("</div>\n<div class=\"maps\">\n");
    for judged in &trial.judged {
        article.literal("<div>\n");
        article.leaf("h4", &[], text::name_of(judged));
        picture(article, &chart::heat(&judged.judgement.heat));
        article.literal("</div>\n");
    }
    article.literal("</div>\n");
}

/// A picture that scrolls where the screen is too narrow to read it.
fn picture(article: &mut Markup, chart: &Markup) {
    article.literal("<div class=\"picture\">\n");
    article.append(chart);
    article.literal("</div>\n");
}

fn legend(article: &mut Markup, class: &str, label: &str) {
    article.literal("<span><svg viewBox=\"0 0 14 14\" aria-hidden=\"true\">");
    article.empty("rect", &[("class", &class), ("width", &14), ("height", &14)]);
    article.literal("</svg>");
    article.text(label);
    article.literal("</span>\n");
}

fn load(article: &mut Markup, routing: &Routing) {
    let counts = routing.tokens_per_expert();
    article.leaf("h3", &[], "Tokens per expert");
    article.leaf("p", &[("class", &"soft")], chart::padding(&counts, TILE));
    article.literal("<div class=\"legend\">");
    legend(article, "tokens", "tokens");
    legend(article, "padding", "padding");
    article.literal("</div>\n");
    picture(article, &chart::columns(&counts, TILE));
}

fn memory(article: &mut Markup, dump: &Dump) {
    let problem = &dump.problem;
    let bytes = dump.storage.bytes();
    let layer =
        Layer::routed(problem.t(), problem.d(), problem.n(), problem.routed() as u128, problem.activation(), bytes);
    article.leaf("h3", &[], "Kept from forward to backward");
    let pairs = count(problem.routed() as u64);
    let note = format!("What each system keeps for a layer of this size, {pairs} pairs in {}.", dump.storage);
    article.leaf("p", &[("class", &"soft")], note);
    article.literal("<div class=\"legend\">");
    let tensors = System::PlainAutograd.tensors(layer).map(|(tensor, _)| tensor);
    chart::TENSORS.iter().zip(tensors).for_each(|(class, tensor)| legend(article, class, tensor));
    article.literal("</div>\n");
    picture(article, &chart::stacks(&System::ALL.map(|system| (system.name(), system.tensors(layer)))));
}

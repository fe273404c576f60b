//! Tables as util-linux draws them: upper-case headings, two spaces between columns, numbers to the
//! right, nothing at a line's end.

/// Which side of its column a cell stands on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Names and words.
    Left,
    /// Numbers and sizes.
    Right,
}

/// What stands in a cell that has nothing to say.
pub const NOTHING: &str = "-";

/// Rows under headings.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns and no rows.
    pub fn new(columns: impl IntoIterator<Item = (&'static str, Align)>) -> Table {
        let columns = columns
            .into_iter()
            .map(|(name, align)| (name.to_owned(), align))
            .collect();
        Table {
            columns,
            rows: Vec::new(),
        }
    }

    /// Adds a row; cells that are missing at its end are empty.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }

    /// The table's text, with or without its headings.
    pub fn render(&self, headings: bool) -> String {
        let heading: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let lines: Vec<&Vec<String>> = headings
            .then_some(&heading)
            .into_iter()
            .chain(&self.rows)
            .collect();
        let cell = |line: &[String], column: usize| -> String {
            match line.get(column).map_or("", |text| text.trim()) {
                "" => NOTHING.to_owned(),
                text => text.to_owned(),
            }
        };
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|column| {
                lines
                    .iter()
                    .map(|line| cell(line, column).chars().count())
                    .max()
            })
            .map(|width| width.unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in lines {
            let mut drawn = String::new();
            for (column, ((_, align), width)) in self.columns.iter().zip(&widths).enumerate() {
                if column > 0 {
                    drawn.push_str("  ");
                }
                let cell = cell(line, column);
                drawn.push_str(&match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                });
            }
            text.push_str(drawn.trim_end());
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new([
            ("NAME", Align::Left),
            ("SIZE", Align::Right),
            ("GPU", Align::Left),
        ]);
        table.row(["fast".into(), "512M".into(), "0000:03:00.0".into()]);
        table.row(["a-long-name".into(), "1G".into()]);
        table
    }

    #[test]
    fn numbers_stand_right_and_lines_have_no_end() {
        assert_eq!(
            table().render(true),
            "NAME         SIZE  GPU\n\
             fast         512M  0000:03:00.0\n\
             a-long-name    1G  -\n"
        );
    }

    #[test]
    fn without_headings_they_take_no_width() {
        let mut table = Table::new([("A-VERY-WIDE-HEADING", Align::Left), ("N", Align::Right)]);
        table.row(["x".into(), "1".into()]);
        assert_eq!(table.render(false), "x  1\n");
    }

    #[test]
    fn no_rows_are_headings_or_nothing() {
        let table = Table::new([("NAME", Align::Left), ("PID", Align::Right)]);
        assert_eq!(table.render(true), "NAME  PID\n");
        assert_eq!(table.render(false), "");
    }

    #[test]
    fn letters_count_not_bytes() {
        let mut table = Table::new([("NAME", Align::Left), ("N", Align::Left)]);
        table.row(["größe".into(), "1".into()]);
        assert_eq!(table.render(true), "NAME   N\ngröße  1\n");
    }
}

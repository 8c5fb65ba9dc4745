//! Dense linear algebra of a few dozen unknowns.

/// A matrix, row by row.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    rows: usize,
    columns: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn zero(rows: usize, columns: usize) -> Matrix {
        Matrix { rows, columns, values: vec![0.0; rows * columns] }
    }

    pub(super) fn from_columns(columns: Vec<Vec<f64>>) -> Matrix {
        let rows = columns.first().map_or(0, Vec::len);
        let mut matrix = Matrix::zero(rows, columns.len());
        for (j, column) in columns.iter().enumerate() {
            column.iter().enumerate().for_each(|(i, value)| *matrix.at_mut(i, j) = *value);
        }
        matrix
    }

    pub(super) fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns + column]
    }

    fn at_mut(&mut self, row: usize, column: usize) -> &mut f64 {
        &mut self.values[row * self.columns + column]
    }

    /// The transposed matrix times a vector.
    pub(super) fn transposed_times(&self, vector: &[f64]) -> Vec<f64> {
        (0..self.columns).map(|j| (0..self.rows).map(|i| self.at(i, j) * vector[i]).sum()).collect()
    }

    /// The transposed matrix times the matrix times `weight`, plus one.
    pub(super) fn normal(&self, weight: f64) -> Matrix {
        let mut normal = Matrix::zero(self.columns, self.columns);
        for a in 0..self.columns {
            for b in 0..self.columns {
                let sum: f64 = (0..self.rows).map(|i| self.at(i, a) * self.at(i, b)).sum();
                *normal.at_mut(a, b) = sum * weight + f64::from(u8::from(a == b));
            }
        }
        normal
    }

    /// Solution of a square system by elimination with pivots; none if it is singular.
    pub(super) fn solve(&self, right: &[f64]) -> Option<Vec<f64>> {
        let n = self.columns;
        let (mut left, mut right) = (self.clone(), right.to_vec());
        for k in 0..n {
            let pivot = (k..n).max_by(|&a, &b| left.at(a, k).abs().total_cmp(&left.at(b, k).abs()))?;
            if left.at(pivot, k).abs() < 1e-300 {
                return None;
            }
            (0..n).for_each(|j| left.values.swap(k * n + j, pivot * n + j));
            right.swap(k, pivot);
            for i in k + 1..n {
                let factor = left.at(i, k) / left.at(k, k);
                (k..n).for_each(|j| *left.at_mut(i, j) -= factor * left.at(k, j));
                right[i] -= factor * right[k];
            }
        }
        for k in (0..n).rev() {
            let known: f64 = (k + 1..n).map(|j| left.at(k, j) * right[j]).sum();
            right[k] = (right[k] - known) / left.at(k, k);
        }
        Some(right)
    }

    /// Inverse of a square matrix; columns of a singular one are 0.
    pub(super) fn inverse(&self) -> Matrix {
        let unit = |j: usize| (0..self.rows).map(|i| f64::from(u8::from(i == j))).collect::<Vec<f64>>();
        let columns = (0..self.columns).map(|j| self.solve(&unit(j)).unwrap_or_else(|| vec![0.0; self.rows]));
        Matrix::from_columns(columns.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::Matrix;

    #[test]
    fn a_system_is_solved_and_inverted() {
        let matrix =
            Matrix::from_columns(vec![vec![0.0, 2.0, 1.0], vec![1.0, 0.0, 3.0], vec![4.0, 1.0, 0.0]]);
        let solution = matrix.solve(&[14.0, 5.0, 7.0]).unwrap();
        for (found, expected) in solution.iter().zip([1.0, 2.0, 3.0]) {
            assert!((found - expected).abs() < 1e-12, "{solution:?}");
        }
        let inverse = matrix.inverse();
        let product = (0..3).map(|k| matrix.at(0, k) * inverse.at(k, 0)).sum::<f64>();
        assert!((product - 1.0).abs() < 1e-12);
        assert!(Matrix::from_columns(vec![vec![0.0]]).solve(&[1.0]).is_none());
    }
}

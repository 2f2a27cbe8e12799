// Pendulum environments for a training server; or, with --replay FILE, the dynamics alone.
#include <fstream>
#include <iomanip>

#include "pendulum.hpp"
#include "plugrl_client.hpp"

class PendulumEnv : public plugrl::Env {
  public:
    explicit PendulumEnv(std::uint64_t seed) : random_(seed) {}

    void reset() override {
        std::uniform_real_distribution<double> angle(-Pendulum::pi, Pendulum::pi), speed(-1.0, 1.0);
        pendulum_.angle = angle(random_);
        pendulum_.speed = speed(random_);
        steps_ = 0;
    }

    plugrl::Outcome step(const std::vector<double>& action) override {
        const double reward = pendulum_.step(action[0]);
        return {reward, false, ++steps_ == time_limit};
    }

    plugrl::Observation observe() const override {
        return {{}, {{"obs", {std::cos(pendulum_.angle), std::sin(pendulum_.angle), pendulum_.speed}}}, "swing up"};
    }

    void use_action_dim(std::size_t dim) override {
        if (dim != 1) throw plugrl::WireError("actions of " + std::to_string(dim) + " numbers; Pendulum takes one torque");
    }

  private:
    static constexpr int time_limit = 200;
    Pendulum pendulum_;
    std::mt19937_64 random_;
    int steps_ = 0;
};

// FILE: the initial angle and speed, then torques; prints angle, speed and reward after each.
int replay(const std::string& path) {
    std::ifstream file(path);
    Pendulum pendulum;
    if (!(file >> pendulum.angle >> pendulum.speed)) {
        std::cerr << "cannot read an angle and a speed from " << path << "\n";
        return 2;
    }
    std::cout << std::setprecision(17);
    for (double torque = 0; file >> torque;) {
        const double reward = pendulum.step(torque);
        std::cout << pendulum.angle << " " << pendulum.speed << " " << reward << "\n";
    }
    return 0;
}

int main(int argc, char** argv) {
    std::string path;
    const auto other = [&path](const std::string& flag, const std::string& value) {
        return flag == "--replay" ? (path = value, true) : false;
    };
    const plugrl::Options options = plugrl::Options::parse(argc, argv, other);
    if (!path.empty()) return replay(path);
    std::vector<std::unique_ptr<plugrl::Env>> envs;
    for (std::size_t i = 0; i < options.num_envs; ++i) envs.push_back(std::make_unique<PendulumEnv>(options.seed + i));
    plugrl::Client client(options, std::move(envs));
    const int code = client.run();
    std::cout << "exit " << code << " after " << client.episodes() << " episodes, mean return " << client.mean_return() << "\n";
    return code;
}
